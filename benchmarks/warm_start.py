"""How soon a second process takes its first step: cold against warm, fresh processes, the same program.

`python benchmarks/warm_start.py` times two programs on this machine: the recipe's LoRA DPO of a tiny Gemma 3, and a
small one in the shape of Gemma 3 270M. Each round runs a process without what XLA compiled, and then one with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import gemma_shaped
import jax

import nnxdsl
from nnxdsl import Experiment, Model
from nnxdsl.runtime.compile_cache import compile_cache

GEMMA = gemma_shaped.Shaped(layers=18, embed_dim=160, mlp_dim=512, head_dim=64, vocab_size=32_768)
PROGRAMS: dict[str, Experiment] = {
    "recipe": gemma_shaped.experiment(Model.Gemma3("tiny"), rows=16, prompt=64, response=56, rank=16),
    "gemma": gemma_shaped.experiment(GEMMA, rows=2, prompt=128, response=64, rank=16),
}


def child(home: Path, name: str) -> dict[str, float]:
    """Weights, first and second step of a program in this process, seconds each; and the first loss."""
    began = time.perf_counter()
    with compile_cache(home, sys.exit):
        program, batch = nnxdsl.compile(PROGRAMS[name]), gemma_shaped.pairs(PROGRAMS[name])
        state = program.init()
        jax.block_until_ready(state)
        placed = time.perf_counter()
        state, metrics = program.step(state, batch)
        loss = float(metrics["loss"])
        stepped = time.perf_counter()
        jax.block_until_ready(program.step(state, batch))
        ended = time.perf_counter()
    return {"weights": placed - began, "first step": stepped - placed, "second step": ended - stepped, "loss": loss}


def fresh(home: str, name: str) -> dict[str, float]:
    """The figures of a process of its own, which compiles nothing that is kept under `home`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")}
    argv = [sys.executable, __file__, "--child", home, name]
    return json.loads(subprocess.run(argv, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Print ratio, least and median of each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="pairs of processes for each program")
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(Path(options.child[0]), options.child[1])))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores, {options.repeat} rounds")
    for name in options.programs:
        cold, warm = [], []
        for _ in range(options.repeat):
            with tempfile.TemporaryDirectory() as home:
                cold.append(fresh(home, name))
                warm.append(fresh(home, name))
        assert len({each["loss"] for each in (*cold, *warm)}) == 1, "a program from the cache computes the same bits"
        for what in ("first step", "weights", "second step"):
            without, result = ([each[what] for each in group] for group in (cold, warm))
            print(
                f"{name:<7} {what:<12} cold/warm {min(without) / min(result):6.2f}   "
                f"cold: min {min(without):6.2f} s, median {statistics.median(without):6.2f} s   "
                f"warm: min {min(result):6.2f} s, median {statistics.median(result):6.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
