"""Where the time of a reference goes that is asked at every step: its forward pass, what that keeps, and the rest.

`python benchmarks/online_reference.py [--rounds 7] [--json FILE]` takes the steps of `dpo_step.py` by turns, with the
reference asked once and at every step, and beside them what such a step has to do more: the policy's forward pass
alone, and that pass keeping what the backward pass needs, which the reference's does as well, since both go through one
loop (so that the margin of equal models is exactly zero).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import step_model

import nnxdsl
from nnxdsl import data
from nnxdsl.program import precomputed

NUMBERS = {
    "batch": 4,
    "prompt": 256,
    "response": 128,
    "beta": 0.1,
    "learning_rate": 2e-5,
    "rank": 16,
    "alpha": 32.0,
    "spread": False,
    "seed": 0,
}
WAYS: tuple[Literal["cached", "online"], ...] = ("cached", "online")


class Steps:
    """Steps of one job, on one batch."""

    def __init__(self, directory: Path, numbers: dict[str, Any], way: Literal["cached", "online"]) -> None:
        asked = step_model.experiment(directory, numbers, way)
        self.program = nnxdsl.compile(asked)
        self.state = self.program.init()
        pairs = data.load(asked.data, data.BytesTokenizer(), vocabulary=step_model.CONFIG.vocab_size)
        batch = data.BatchSampler(pairs, batch_size=asked.batch_size, seed=0, order=asked.data.order).batch_at(0)
        if way == "cached":
            batch = jax.tree.map(np.asarray, precomputed.with_reference_logps(self.program, self.state, batch))
        self.batch = batch

    def step(self) -> None:
        """One step."""
        self.state, metrics = self.program.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))

    def forward(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The forward pass alone, and with what the backward pass needs of it."""
        computation, frozen, batch = self.program.policy_loss, self.state.frozen, self.program.shard_batch(self.batch)

        def alone(trainable: Any, frozen: Any) -> Any:
            return computation.make_forward(frozen, batch, {})(computation.cast(trainable)).loss_inputs

        def keeping(trainable: Any, frozen: Any) -> Any:
            out, back = jax.vjp(computation.make_forward(frozen, batch, {}), computation.cast(trainable))
            return out.loss_inputs, jax.tree.leaves(back)

        passes = jax.jit(alone), jax.jit(keeping)
        return tuple(lambda run=run: jax.block_until_ready(run(self.state.trainable, frozen)) for run in passes)  # pyright: ignore[reportReturnType]


def measured(is_lora: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn."""
    with tempfile.TemporaryDirectory() as place:
        numbers = {**NUMBERS, "lora": is_lora}
        step_model.write(Path(place), numbers, batches=1)
        sides = {way: Steps(Path(place), numbers, way) for way in WAYS}
        alone, keeping = sides["online"].forward()
        acts = {**{way: side.step for way, side in sides.items()}, "forward": alone, "keeping": keeping}
        result: dict[str, list[float]] = {name: [] for name in acts}
        for turn in range(rounds + 2):
            for name, act in acts.items():
                began = time.perf_counter()
                act()
                if turn > 1:  # the first turns compile
                    result[name].append(time.perf_counter() - began)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reported: dict[str, dict[str, list[float]]] = {}
    for name, is_lora in (("all weights", False), ("LoRA", True)):
        reported[name] = result = measured(is_lora, options.rounds)
        least, middle = ({k: of(v) for k, v in result.items()} for of in (min, statistics.median))
        print(f"{name}; seconds, least and median of {options.rounds}")
        print(f"  {'step, reference asked once':<44}{least['cached']:>8.3f}{middle['cached']:>8.3f}")
        print(f"  {'step, reference asked at every step':<44}{least['online']:>8.3f}{middle['online']:>8.3f}")
        more = {k: v["online"] - v["cached"] for k, v in (("least", least), ("middle", middle))}
        print(f"  {'that is more by':<44}{more['least']:>8.3f}{more['middle']:>8.3f}")
        print(f"  {'  a forward pass alone':<44}{least['forward']:>8.3f}{middle['forward']:>8.3f}")
        print(f"  {'  one that keeps what a backward pass needs':<44}{least['keeping']:>8.3f}{middle['keeping']:>8.3f}")
    if options.json:
        options.json.write_text(json.dumps(reported, indent=2) + "\n")


if __name__ == "__main__":
    main()
