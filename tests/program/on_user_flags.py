"""Run by test_user_flags.py in a process that compiles as a user's does: a line before each case, which names it.

    python tests/program/on_user_flags.py FAMILY=CASE,CASE [FAMILY=CASE,CASE ...]

A case is "48x2" (the logits of 2 rows of 48 tokens), "generate" (eight tokens), or a step: "sft", "dpo" (with LoRA),
"packed-sft", "packed-dpo". Weights are drawn here, since XLA would take longer to compile their drawing than a step.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl import Adapter, Batching, Data, Experiment, Memory, Model, Objective, Optimizer, Schedule
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.prepare import prepare
from nnxdsl.weights.export import forward_of

LENGTHS = (40, 23, 31, 12)
"""Tokens of the rows: one takes most of a packed row, two of the others share one."""


def experiment(family: str, directory: Path, *, dpo: bool = False, packed: bool = False) -> Experiment:
    """A family's smallest preset, on texts or pairs of unequal lengths."""
    if dpo:
        objective: Any = Objective.DPO()
        data: Any = Data.Preferences(str(directory / "pairs.jsonl"), max_prompt_length=24, max_completion_length=24)
    else:
        objective, data = Objective.SFT(loss_on="all"), Data.Text(str(directory / "texts.jsonl"), max_length=48)
    return Experiment(
        name="as-users-compile",
        model=getattr(Model, family)("tiny"),
        objective=objective,
        data=data,
        adapter=Adapter.LoRA(rank=2) if dpo else None,
        memory=Memory(reference="online") if dpo else Memory(),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
        batching=Batching.Packed() if packed else Batching.Padded(),
        batch_size=4,
        steps=2,
    )


def write_rows(directory: Path) -> None:
    """Writes the texts and the pairs; the tokens are bytes."""
    draw = np.random.default_rng(0)

    def text(length: int) -> str:
        return "".join(chr(code) for code in draw.integers(97, 123, length))

    texts = [{"text": text(length)} for length in LENGTHS * 2]
    pairs = [
        {"prompt": text(length // 2), "chosen": text(length // 3), "rejected": text(length // 2)}
        for length in LENGTHS * 2
    ]
    for name, rows in (("texts", texts), ("pairs", pairs)):
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def initial_state(program: Program) -> TrainState:
    """A first state: small random numbers for weights, zeros for the optimizer."""
    draw = np.random.default_rng(0)

    def weights(leaves: Any) -> Any:
        return {path: jnp.asarray(draw.normal(0, 0.02, leaf.shape), leaf.dtype) for path, leaf in leaves.items()}

    state = program.abstract()
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (state.step, state.optimizer))
    trainable, frozen, reference = map(weights, (state.trainable, state.frozen, state.reference))
    return TrainState(zeros[0], trainable, zeros[1], frozen, reference)


def step(family: str, directory: Path, case: str) -> Callable[[], Any]:
    """Two steps of training; gives the loss."""
    reported = experiment(family, directory, dpo="dpo" in case, packed="packed" in case)
    prepared = prepare(reported, directory / "runs", Display(quiet=True))
    program, state = prepared.program, initial_state(prepared.program)

    def run() -> Any:
        result = state
        with prepared.batches() as batches:
            result, metrics = program.step(result, batches.batch_at(0, result).batch)
        return metrics["loss"]

    return run


def main(argv: list[str]) -> None:
    """Runs the cases of each family, and says which one it is at."""
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_rows(directory)
        for word in argv:
            family, _, cases = word.partition("=")
            prepared = prepare(experiment(family, directory), directory / "runs", Display(quiet=True))
            template, leaves = prepared.program.policy(initial_state(prepared.program))
            forward, config = forward_of(template), prepared.program.blueprint.config
            for case in cases.split(","):
                print(f"{family} {case}", flush=True)
                if case == "generate":
                    sample = Sampler(template, config, jnp.float32, ())
                    result: Any = sample(leaves, [[5] * 33, [7] * 17], Sampling(max_new_tokens=8))
                    assert [len(row) for row in result] == [8, 8]
                elif case[0].isdigit():
                    length, rows = map(int, case.split("x"))
                    ids = np.random.default_rng(length).integers(3, 200, (rows, length)).astype(np.int32)
                    assert np.isfinite(forward(leaves, ids)).all()
                else:
                    assert np.isfinite(step(family, directory, case)())
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
