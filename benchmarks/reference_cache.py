"""What a reference that is asked once saves: first pass against a hit, and a step with it against one without.

`python benchmarks/reference_cache.py`; some minutes on two cores. The recipe `experiments/dpo_gemma.py` from random
weights, all its pairs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np

from nnxdsl import Experiment, Memory, Weights, compile
from nnxdsl.config.core.serialization import evolve
from nnxdsl.data.loaders.build import load
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.tokenizers.base import BytesTokenizer
from nnxdsl.program import precomputed
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.runs.array_digest import digest
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.precompute_cache import PrecomputeCache
from nnxdsl.trainer.precompute_specs import reference_logps

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))


def recipe(adapted: bool, reference: str) -> Experiment:
    """The recipe from random weights, with its reference asked once or at every step."""
    from dpo_gemma import experiment  # noqa: PLC0415 - beside the other recipes, which are no package

    whole = attrs.evolve(experiment, evaluation=None, memory=Memory(reference=reference))
    return evolve(whole, {"model.weights": Weights.Random(), **({} if adapted else {"adapter": None})})


def passes(program: Program, state: TrainState, dataset: Pairs) -> dict[str, float]:
    """Seconds of the first pass over all pairs and of a hit, and the largest margin before the first step."""
    with tempfile.TemporaryDirectory() as home:
        spec = reference_logps(program, digest(state.frozen), dataset, state)
        cache = PrecomputeCache(Path(home), Display(quiet=True), lambda: False)
        rows = np.arange(len(dataset))
        took = []
        for _ in range(2):
            start = time.perf_counter()
            arrays = cache.load_or_compute(spec, dataset, rows)
            took.append(time.perf_counter() - start)
    assert arrays is not None
    batch = dataset.with_reference_logps(arrays["logps"]).batch(range(16), 16)
    judged = program.evaluate(state, batch)["rewards/margins"]
    _, metrics = program.step(state, batch)
    margins = {"evaluated": float(judged.total / judged.count), "trained": float(metrics["rewards/margins"])}
    return {"pass": took[0], "hit": took[1], **{f"margin, {name}": value for name, value in margins.items()}}


def steps(adapted: bool, dataset: Pairs, repeat: int) -> dict[str, list[float]]:
    """Seconds of steps of both modes, one after the other in turn."""
    sides: dict[str, Any] = {}
    for mode in ("cached", "online"):
        program = compile(recipe(adapted, mode))
        state = program.init()
        batch = program.shard_batch(dataset.batch(range(16), 16))
        batch = jax.block_until_ready(
            precomputed.with_reference_logps(program, state, batch) if mode == "cached" else batch
        )
        sides[mode] = [program, program.step(state, batch)[0], batch]
    took: dict[str, list[float]] = {mode: [] for mode in sides}
    for _ in range(repeat):
        for mode, side in sides.items():
            program, state, batch = side
            start = time.perf_counter()
            side[1], metrics = program.step(state, batch)
            jax.block_until_ready(metrics)
            took[mode].append(time.perf_counter() - start)
    return took


def main() -> None:
    """Measure and print, ratios first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="steps of each side")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()

    asked = recipe(True, "cached")
    asked = evolve(asked, {"data.path": str(ROOT / asked.data.path)})
    dataset = load(asked.data, BytesTokenizer())
    assert isinstance(dataset, Pairs)
    program = compile(asked)
    result: dict[str, Any] = {"pairs": len(dataset), **passes(program, program.init(), dataset)}
    print(f"{platform.machine()}, {jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(
        f"hit / pass  {result['hit'] / result['pass']:.4f}: {result['pass']:.2f} s and {result['hit']:.3f} s,", end=" "
    )
    print(f"{len(dataset):,} pairs; margin at step 0: {result['margin, evaluated']:g} when evaluated,", end=" ")
    print(f"{result['margin, trained']:.1g} in the step")
    for name, adapted in (("LoRA", True), ("full", False)):
        took = steps(adapted, dataset, options.repeat)
        result[name] = took
        least = {mode: min(times) for mode, times in took.items()}
        middle = {mode: statistics.median(times) for mode, times in took.items()}
        print(f"{name:5} cached / online  {least['cached'] / least['online']:.3f} of minima,", end=" ")
        print(f"{middle['cached'] / middle['online']:.3f} of medians;", end=" ")
        print(", ".join(f"{mode} {least[mode] * 1e3:.1f} ms ({middle[mode] * 1e3:.1f})" for mode in took))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
