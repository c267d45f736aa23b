"""What a step costs the host: Python's thread between two steps of a 26-layer Gemma 3 that computes next to nothing.

`python benchmarks/host_overhead.py` interleaves, in one process, `Program.step` on a batch that lies on the device, the
same XLA program called with a flat list of arrays, and what a run does besides: batch, metrics, status. A thread's own
processor time is taken, from the call to its return; what the device computes meanwhile is in other threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gemma_shaped
import jax

import nnxdsl
from nnxdsl.planning.flops import work
from nnxdsl.program.compile import TrainState
from nnxdsl.program.step import DonatedState
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage.jsonl import JsonLines
from nnxdsl.trainer.throughput import Speed

AIM = 0.15
"""Milliseconds that a step should cost the host."""


class Bench:
    """A program, its state, and the ways of calling it."""

    def __init__(self, place: Path, layers: int) -> None:
        asked = gemma_shaped.experiment(gemma_shaped.Shaped(layers=layers))
        self.program, self.batch = nnxdsl.compile(asked), gemma_shaped.pairs(asked)
        self.placed, self.flops = self.program.shard_batch(self.batch), work(self.program.blueprint, self.batch)
        self.state, self.metrics = self.program.step(self.program.init(), self.placed)
        self.leaves = [*jax.tree.leaves(self.state)]
        kept = TrainState(*self.state)
        moving = DonatedState(kept.step, kept.trainable, kept.optimizer, {})
        arguments, form = jax.tree.flatten((moving, kept.frozen, kept.reference, self.placed))
        moved = len(jax.tree.leaves(moving))

        def flat(moving: list[Any], fixed: list[Any]) -> tuple[list[Any], Any]:
            after, metrics = self.program.train_step(*jax.tree.unflatten(form, [*moving, *fixed]))
            return jax.tree.leaves(after), metrics

        copies = jax.tree.map(lambda leaf: leaf.copy(), arguments[:moved])
        self.fixed = arguments[moved:]
        self.executable = jax.jit(flat, donate_argnums=0).lower(copies, self.fixed).compile()
        self.flat_state = copies
        self.lines, self.speed = JsonLines(place / "metrics.jsonl"), Speed.of(self.program)
        self.directory = RunDirectory.create(
            place / "runs" / "bench", identity="bench", experiment_json={}, experiment_py=""
        )

    def step(self) -> None:
        """`Program.step`, as a run calls it on accelerators."""
        self.state, self.metrics = self.program.step(self.state, self.placed)

    def flat(self) -> None:
        """The same program without names: a list of arrays in, one out."""
        self.flat_state, self.metrics = self.executable(self.flat_state, self.fixed)

    def make(self) -> None:
        """A batch on its way to the device, and its operations counted: in a thread of its own on accelerators."""
        self.program.shard_batch(self.batch)
        self.flops = work(self.program.blueprint, self.batch)

    def settle(self) -> None:
        """Reading and writing the metrics of a step that is done, as a run does."""
        values = {name: value.item() for name, value in self.metrics.items()}
        self.lines.append({"step": 1, **values, **self.speed.rates(100, 0.1), **self.speed.use(self.flops, 0.1)})
        self.directory.beat(state="running", step=1)
        self.directory.stop_requested()


def thread_seconds(call: Callable[[], None], bench: Bench) -> float:
    """Processor time of this thread in one call, with nothing under way on the device."""
    jax.block_until_ready((bench.state, bench.flat_state, bench.metrics))
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main() -> None:
    """Print the ratio, then least and median of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=200, help="rounds")
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place), options.layers)
        parts = {"step": bench.step, "flat": bench.flat, "make": bench.make, "settle": bench.settle}
        figures: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(options.repeat):
            for name, call in parts.items():
                figures[name].append(1e3 * thread_seconds(call, bench))
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores, {options.repeat} rounds")
    print(f"{options.layers} layers, {len(bench.leaves)} arrays")
    print(f"Program.step over a flat list of arrays: {min(figures['step']) / min(figures['flat']):.2f}")
    for name, values in figures.items():
        doc = (parts[name].__doc__ or "").partition(":")[0].partition(",")[0].rstrip(".")
        print(f"{name:<7} min {min(values):.3f} ms   median {statistics.median(values):.3f} ms   {doc}")
    print(f"aim: {AIM} ms for a step")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
