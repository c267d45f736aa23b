"""Completions of several turns: the tokens of others are context, and in no log-probability, length, mean or gradient.

The replay has one sequence a row, whose statistics by token come through the SFT program, and writes the losses down in
numpy's float64: it shares no code with batches of pairs, nor with their losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Objective, compile
from nnxdsl.data import Pairs
from nnxdsl.data.batch import SequenceBatch, token_count
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.packing import Size, fit
from nnxdsl.data.ragged import RaggedBuilder
from nnxdsl.planning.flops import work
from nnxdsl.program.batches.base import kind_of
from nnxdsl.program.compile import Program, TrainState

SIDES = ("chosen", "rejected")
ROWS, LENGTH, BETA, TAIL = range(4), 48, 0.1, 0.25
PROMPT = 6
SIZE = Size(blocks=2, rows=2, length=64, targets=64, items=4)
TURNS = {  # tokens of the assistant, of others, of the assistant, ...; a completion may begin with others' (0, ...)
    "chosen": [(3, 4, 5), (4,), (0, 3, 6, 2, 1), (2, 1, 2)],
    "rejected": [(2, 6, 3), (5, 2, 2), (0, 2, 4), (7,)],
}
OPTIONS: dict[str, Any] = {
    "model": Small(layers=1, pattern=1),
    "adapter": Adapter.LoRA(rank=2),
    "microbatch_size": 2,
}
RTOL = 5e-6
"""Relative, of losses and means in float32 against float64 (5e-7 seen)."""
GRADIENT = 8e-6
"""Of gradients, by the largest entry of all (9e-7 seen)."""


def rows_of(masks: dict[str, list[list[int]]], *, is_plain: bool = False) -> Pairs:
    """Pairs whose completions have such masks; an empty mask in place of one of ones alone, or none at all."""
    draw = np.random.default_rng(0)
    parts = {name: RaggedBuilder() for name in ("prompt", *SIDES, *(() if is_plain else [f"{s}_mask" for s in SIDES]))}
    for row in ROWS:
        parts["prompt"].add(draw.integers(1, 48, PROMPT - row % 3).tolist())
        for side in SIDES:
            mask = masks[side][row]
            parts[side].add(draw.integers(1, 48, len(mask)).tolist())
            if not is_plain:
                parts[f"{side}_mask"].add([] if all(mask) else mask)
    report = Report(source="rows.jsonl", rows=4, accepted=4, cut={}, dropped={}, odd={}, first={}, lengths={})
    built = {name: part.build() for name, part in parts.items()}
    return Pairs(TokenizedRows(built, [f"rows.jsonl:{row + 1}" for row in ROWS], report, "digest", is_chat=True))


@pytest.fixture(scope="module")
def masks() -> dict[str, list[list[int]]]:
    return {
        side: [np.repeat([(i + 1) % 2 for i in range(len(turns))], turns).tolist() for turns in rows]
        for side, rows in TURNS.items()
    }


@pytest.fixture(scope="module")
def dataset(masks: dict[str, list[list[int]]]) -> Pairs:
    return rows_of(masks)


class Replay(NamedTuple):
    """Of each side and row: log-probability and entropy of its targets, and the gradient of their sum, float64."""

    logps: dict[str, list[np.ndarray]]
    entropy: dict[str, list[np.ndarray]]
    grads: dict[str, list[dict[str, np.ndarray]]]


def program_of(experiment: Callable[..., Experiment], objective: Objective) -> Program:
    return compile(experiment(objective=objective, **OPTIONS))


@pytest.fixture(scope="module")
def dpo(experiment: Callable[..., Experiment]) -> Program:
    return program_of(experiment, Objective.DPO(beta=BETA))


@pytest.fixture(scope="module")
def state(dpo: Program, trained: Callable[..., TrainState], with_b: Callable[..., TrainState]) -> TrainState:
    return with_b(trained(dpo))


@pytest.fixture(scope="module")
def replay(
    experiment: Callable[..., Experiment],
    trained: Callable[..., TrainState],
    with_b: Callable[..., TrainState],
    dataset: Pairs,
    masks: dict[str, list[list[int]]],
) -> Callable[[bool], Replay]:
    sft = program_of(experiment, Objective.SFT(loss_on="all"))
    gradients = jax.jit(sft.policy_loss.grads)

    def make(is_reference: bool) -> Replay:
        state = trained(sft) if is_reference else with_b(trained(sft))
        result = Replay({}, {}, {})
        for side in SIDES:
            tokens, target = np.zeros((2, 4, LENGTH), np.int32)
            lengths = np.zeros(4, np.int32)
            for row in ROWS:
                parts = dataset.row(row)
                ids = np.concatenate([parts["prompt"], parts[side]])
                lengths[row] = len(ids)
                tokens[row, : len(ids)] = ids
                target[row, len(parts["prompt"]) : len(ids)] = masks[side][row]
            batch = SequenceBatch(tokens, lengths, target.astype(bool), np.ones(4, np.float32))
            stats = jax.device_get(sft.score(state, batch).token_stats)
            here = [stats.mask[row] > 0 for row in ROWS]
            result.logps[side] = [stats.logp[row][here[row]].astype(np.float64) for row in ROWS]
            result.entropy[side] = [stats.entropy[row][here[row]].astype(np.float64) for row in ROWS]
            if not is_reference:  # of a sum of negative log-probabilities
                arrays = state.trainable, state.frozen, state.reference
                alone = [batch._replace(weight=np.eye(4, dtype=np.float32)[row]) for row in ROWS]
                result.grads[side] = [jax.device_get(gradients(*arrays, one))[0] for one in alone]
        return result

    return make


def packed(dataset: Pairs) -> Any:
    layout = fit(*dataset.packing_lengths(), SIZE)
    assert layout is not None
    return dataset.packed(np.array(ROWS), SIZE, layout)


def both(dataset: Pairs) -> list[Any]:
    return [dataset.batch(ROWS, 4), packed(dataset)]


def of_terms(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(x.total / x.count) for name, x in jax.device_get(metrics).items()}


@pytest.mark.extended
def test_dpo_equals_a_replay_padded_and_packed(
    dpo: Program, state: TrainState, dataset: Pairs, replay: Callable[[bool], Replay]
) -> None:
    policy, reference = replay(False), replay(True)
    ratios = {
        s: np.array([p.sum() - q.sum() for p, q in zip(policy.logps[s], reference.logps[s], strict=True)])
        for s in SIDES
    }
    margins = BETA * (ratios["chosen"] - ratios["rejected"])
    assert np.ptp(margins) > 0.1
    tokens = np.concatenate([x for side in SIDES for x in policy.entropy[side]])
    expected = {
        "loss": np.log1p(np.exp(-margins)).mean(),
        "rewards/margins": margins.mean(),
        "rewards/chosen": BETA * ratios["chosen"].mean(),
        "logps/chosen": np.mean([x.sum() for x in policy.logps["chosen"]]),
        "logps/rejected": np.mean([x.sum() for x in policy.logps["rejected"]]),
        "entropy": tokens.mean(),
    }
    pull = -BETA / (1 + np.exp(margins))  # of each pair by its chosen log-probability
    gradient = {
        path: sum(
            -pull[row] * (policy.grads["chosen"][row][path] - policy.grads["rejected"][row][path].astype(np.float64))
            for row in ROWS
        )
        for path in policy.grads["chosen"][0]
    }
    scale = max(np.abs(leaf).max() for leaf in gradient.values())
    gradients = jax.jit(dpo.policy_loss.grads)
    for batch in both(dataset):
        actual, terms = jax.device_get(gradients(state.trainable, state.frozen, state.reference, batch))
        figures = of_terms({"loss": terms.loss, **terms.metrics})
        for name, value in expected.items():
            assert figures[name] == pytest.approx(value, rel=RTOL), name
        for path, leaf in gradient.items():
            np.testing.assert_allclose(actual[path], leaf, rtol=0, atol=GRADIENT * scale, err_msg=path)
        # All tokens are read, and those of others are no targets.
        assert token_count(batch) == sum(len(dataset.row(row)[name]) for row in ROWS for name in ("prompt", *SIDES))
        assert kind_of(batch).lengths(batch).targets == len(tokens)
    assert len({work(dpo.blueprint, batch).model_flops for batch in both(dataset)}) == 1


@pytest.mark.extended
@pytest.mark.parametrize("objective", [Objective.SimPO(beta=2.0, gamma=0.5), Objective.DPO(beta=BETA, ld_alpha=TAIL)])
def test_lengths_are_those_of_targets(
    objective: Objective,
    experiment: Callable[..., Experiment],
    trained: Callable[..., TrainState],
    with_b: Callable[..., TrainState],
    dataset: Pairs,
    replay: Callable[[bool], Replay],
) -> None:
    """The mean of SimPO, and LD-DPO's tail: what a completion has beyond as many targets as the shorter one."""
    program = program_of(experiment, objective)
    state = with_b(trained(program))
    policy = replay(False)
    if objective.needs_reference:
        reference = replay(True)

        def summed(of: Replay, side: str, row: int) -> float:
            shared = min(len(of.logps[each][row]) for each in SIDES)
            ours = of.logps[side][row]
            return ours[:shared].sum() + TAIL * ours[shared:].sum()

        ratios = {s: np.array([summed(policy, s, r) - summed(reference, s, r) for r in ROWS]) for s in SIDES}
        margins = BETA * (ratios["chosen"] - ratios["rejected"])
    else:
        means = {s: np.array([x.mean() for x in policy.logps[s]]) for s in SIDES}
        margins = 2.0 * (means["chosen"] - means["rejected"]) - 0.5
    loss = np.log1p(np.exp(-margins)).mean()
    for batch in both(dataset):
        assert of_terms(program.evaluate(state, batch))["loss"] == pytest.approx(loss, rel=RTOL)


@pytest.mark.extended
def test_a_precomputed_reference_and_single_answers(
    dpo: Program, state: TrainState, dataset: Pairs, masks: dict[str, list[list[int]]]
) -> None:
    first = dataset.batch(ROWS, 4)
    scored: Any = jax.device_get(dpo.score(state, first).loss_inputs)
    kept = dataset.with_reference_logps(np.stack([scored.chosen_logps, scored.rejected_logps], axis=-1))
    for batch in both(kept):
        figures = of_terms(dpo.evaluate(state, batch))
        assert figures["loss"] == pytest.approx(np.log(2), rel=1e-5)
        assert figures["rewards/margins"] == pytest.approx(0, abs=1e-5)
    # Only data with a completion of several turns has the further arrays, and ones in them change no figure.
    ones = {side: [[1] * len(mask) for mask in rows] for side, rows in masks.items()}
    plain, marked = both(rows_of(ones, is_plain=True)), both(rows_of(ones))
    for batch, other in zip(plain, marked, strict=True):
        extra = [name for name in batch._fields if name.endswith(("_mask", "_targets"))]
        assert [getattr(batch, name) for name in extra] == [None, None]
        assert all(getattr(other, name) is not None for name in extra)
        assert of_terms(dpo.evaluate(state, batch)) == pytest.approx(of_terms(dpo.evaluate(state, other)), rel=1e-6)
