"""Metrics that differ from TRL's by definition: each equals what TRL logs once the tokens are counted as TRL does.

tests/reference/make_trl_metrics.py records TRL's DPOTrainer on a mixture of experts, with 4, 2 and 1 pairs per
micro-batch. Sums over single pairs are enough to rebuild both definitions, since router and token statistics add.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from nnxdsl import Data, Experiment, Memory, Model, Objective, Optimizer, Schedule, Weights, compile
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.models.moe.router import RouterStats, load_balance
from nnxdsl.program.compile import Program, TrainState

REFERENCE = Path(__file__).parents[1] / "reference"
RECORD: dict[str, Any] = json.loads((REFERENCE / "trl_metrics" / "expected.json").read_text())
LOGGED: dict[str, list[dict[str, float]]] = RECORD["logged_by_pairs_per_microbatch"]
PAIRS: list[dict[str, list[int]]] = RECORD["pairs"]
COEFFICIENT: float = RECORD["router_aux_loss_coef"]
BATCH: int = RECORD["batch_size"]
LENGTH = 20
STEPS = range(len(PAIRS) // BATCH)
EVERY_STEP = [(microbatch, step) for microbatch in (4, 2, 1) for step in STEPS]


class PairStats(NamedTuple):
    """Sums over the tokens of some pairs, in the program's own layout: one copy of each prompt.

    Attributes:
        pair: Router statistics of prompt, chosen and rejected completion.
        prompt: Router statistics of the prompts alone.
        entropy: Sum over completion tokens.
        correct: Sum over completion tokens.
        tokens: Number of completion tokens.
        chosen_correct: `correct` over the chosen completions alone.
        chosen_tokens: Number of tokens of the chosen completions.
    """

    pair: RouterStats
    prompt: RouterStats
    entropy: float
    correct: float
    tokens: float
    chosen_correct: float
    chosen_tokens: float


def experiment(microbatch: int) -> Experiment:
    """DPO on the recorded checkpoint, at learning rate 0."""
    path = str(REFERENCE / "families" / "mixtral")
    return Experiment(
        name="metrics",
        model=Model.HF(path, weights=Weights.HF(path), router_aux_loss_coef=COEFFICIENT),
        objective=Objective.DPO(beta=0.1),
        data=Data.Preferences("none.jsonl", max_prompt_length=LENGTH, max_completion_length=LENGTH),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.0), max_grad_norm=None),
        memory=Memory(reference="online"),
        batch_size=BATCH,
        microbatch_size=microbatch,
        steps=10,
    )


def padded(rows: list[list[int]], *, left: bool = False) -> np.ndarray:
    """Rows of token ids with zeros on the right, or on the left."""
    out = np.zeros((len(rows), LENGTH), np.int32)
    for slots, ids in zip(out, rows, strict=True):
        slots[LENGTH - len(ids) if left else 0 :][: len(ids)] = ids
    return out


def lengths_of(rows: list[list[int]]) -> np.ndarray:
    """The number of tokens of each row."""
    return np.array([len(ids) for ids in rows], np.int32)


def rollout_batch(rows: list[dict[str, list[int]]]) -> PairBatch:
    """A batch of recorded pairs."""
    columns = {name: [row[f"{name}_ids"] for row in rows] for name in ("prompt", "chosen", "rejected")}
    return PairBatch(
        prompt=padded(columns["prompt"], left=True),
        chosen=padded(columns["chosen"]),
        rejected=padded(columns["rejected"]),
        prompt_length=lengths_of(columns["prompt"]),
        chosen_length=lengths_of(columns["chosen"]),
        rejected_length=lengths_of(columns["rejected"]),
        weight=np.ones(len(rows), np.float32),
    )


def one_prompt(ids: list[int]) -> SequenceBatch:
    """A prompt alone, of which nothing is a target."""
    tokens = padded([ids])
    return SequenceBatch(tokens, lengths_of([ids]), np.zeros(tokens.shape, bool), np.ones(1, np.float32))


@cache
def compiled(microbatch: int) -> tuple[Program, TrainState]:
    program = compile(experiment(microbatch))
    return program, program.init()


@cache
def by_pair() -> list[PairStats]:
    """The statistics of each recorded pair."""
    program, state = compiled(2)

    def stats_of(row: dict[str, list[int]]) -> PairStats:
        read = program.score(state, rollout_batch([row]))
        tokens = read.token_stats
        chosen = tokens.mask[:, :LENGTH]
        prompt = program.score(state, one_prompt(row["prompt_ids"])).router_stats
        assert read.router_stats is not None
        assert prompt is not None
        sums = (tokens.entropy * tokens.mask, tokens.correct * tokens.mask, tokens.mask)
        of_chosen = (tokens.correct[:, :LENGTH] * chosen, chosen)
        return PairStats(read.router_stats, prompt, *(float(x.sum()) for x in (*sums, *of_chosen)))

    return jax.device_get([stats_of(row) for row in PAIRS])


def summed(step: int, microbatch: int) -> list[PairStats]:
    """The sums of each micro-batch of a step."""
    rows = by_pair()[step * BATCH : (step + 1) * BATCH]
    parts = [rows[first : first + microbatch] for first in range(0, BATCH, microbatch)]
    return [jax.tree.map(lambda *values: sum(values), *part) for part in parts]


def aux_loss(stats: RouterStats) -> float:
    total, count = load_balance(stats)
    return float(total / count)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


AS_TRL: dict[str, Callable[[PairStats], float]] = {
    "aux_loss": lambda part: aux_loss(jax.tree.map(np.add, part.pair, part.prompt)),
    "entropy": lambda part: part.entropy / part.tokens,
    "mean_token_accuracy": lambda part: part.chosen_correct / part.chosen_tokens,
}
"""What TRL logs for one micro-batch: routers see the prompt of a pair twice, and accuracy is of chosen completions."""

OURS: dict[str, Callable[[PairStats], float]] = {
    "aux_loss": lambda part: aux_loss(part.pair),
    "entropy": lambda part: part.entropy / part.tokens,
    "mean_token_accuracy": lambda part: part.correct / part.tokens,
}
"""What nnxdsl logs for a step, from the sums over its whole batch."""


@pytest.mark.parametrize(("microbatch", "step"), EVERY_STEP)
@pytest.mark.parametrize("metric", AS_TRL)
def test_counted_as_trl_counts_it_equals_what_trl_logs(metric: str, microbatch: int, step: int) -> None:
    """TRL averages its metrics over micro-batches, each with the same weight, however many tokens it has."""
    actual = mean([AS_TRL[metric](part) for part in summed(step, microbatch)])
    assert actual == pytest.approx(LOGGED[str(microbatch)][step][metric], rel=2e-6)


@pytest.mark.parametrize("step", STEPS)
def test_the_definitions_differ_on_these_pairs(step: int) -> None:
    """TRL's figure depends on the micro-batch; counting one copy of each prompt is a third figure."""
    (whole,) = summed(step, BATCH)
    recorded = [LOGGED[str(microbatch)][step]["aux_loss"] for microbatch in (4, 2, 1)]
    figures = sorted([*recorded, OURS["aux_loss"](whole)])
    assert min(high - low for low, high in pairwise(figures)) > 1e-3
    entropies = sorted(LOGGED[str(microbatch)][step]["entropy"] for microbatch in (4, 2, 1))
    assert min(high - low for low, high in pairwise(entropies)) > 1e-4


@pytest.mark.extended
@pytest.mark.parametrize("microbatch", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_logs_the_statistics_of_its_whole_batch(microbatch: int) -> None:
    """The same figures for any micro-batch size, with each prompt counted once."""
    wholes = {step: summed(step, BATCH)[0] for step in STEPS}  # before a step donates the first weights
    program, state = compiled(microbatch)
    for step in STEPS:
        state, metrics = program.step(state, rollout_batch(PAIRS[step * BATCH : (step + 1) * BATCH]))
        whole = wholes[step]
        for name, of in OURS.items():
            assert float(metrics[name]) == pytest.approx(of(whole), rel=2e-6), name
        assert float(metrics["loss"]) == pytest.approx(math.log(2) + COEFFICIENT * OURS["aux_loss"](whole), rel=2e-6)
        for name in ("logps/chosen", "logps/rejected"):  # sums over completions: both count the same tokens
            assert float(metrics[name]) == pytest.approx(LOGGED["4"][step][name], rel=2e-6), name
