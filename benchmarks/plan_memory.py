"""How near a plan comes to what XLA's compiler for an H200 takes, and how long it takes; no GPU is needed.

`python benchmarks/plan_memory.py` needs the compiler for CUDA (`docs/guides/plan.md` says how to install it) and ends
with exit code 1 if a plan is more than 10 % off; with `--layout` it takes times instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs

from nnxdsl import Adapter, Data, Experiment, Memory, Mesh, Model, Objective, Optimizer, Schedule, to_python
from nnxdsl.planning.aot_process import compiled_report
from nnxdsl.planning.plan import plan
from nnxdsl.sharding import hardware

DEVICE = "h200"
AT_MOST = 0.10
"""Of what the compiler says, that a plan may be off."""

GEMMA, LLAMA = Model.Gemma3("1b"), Model.Llama3("8b")
FIGURES = "{:<12} {:<12} {:>7} {:>5} {:>11} {:>12} {:>12} {:>10} {:>8} {:>8}"
HEADINGS = (
    *("model", "trained", "devices", "remat", "micro-batch", "planned GiB", "XLA GiB", "difference"),
    *("lower s", "compile s"),
)


@attrs.frozen
class Job:
    """One row of the table; `rows`: of a micro-batch, on all devices together."""

    model: Model
    lora: bool
    devices: int
    remat: str
    rows: int

    @property
    def experiment(self) -> Experiment:
        """With four micro-batches a step."""
        return Experiment(
            name="memory",
            model=self.model,
            adapter=Adapter.LoRA(rank=16) if self.lora else None,
            objective=Objective.DPO(),
            data=Data.Preferences("none.jsonl", max_prompt_length=512, max_completion_length=256),
            optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5)),
            batch_size=4 * self.rows,
            microbatch_size=self.rows,
            steps=10,
            mesh=Mesh(fsdp=self.devices),
            memory=Memory(remat=self.remat),  # pyright: ignore[reportArgumentType]
        )


JOBS = (
    Job(GEMMA, True, 1, "none", 2),
    Job(GEMMA, True, 1, "full", 8),
    Job(GEMMA, True, 8, "none", 16),
    Job(GEMMA, True, 8, "full", 64),
    Job(GEMMA, False, 1, "none", 2),
    Job(GEMMA, False, 1, "full", 8),
    Job(GEMMA, False, 8, "none", 16),
    Job(GEMMA, False, 8, "full", 64),
    Job(LLAMA, True, 1, "none", 1),
    Job(LLAMA, True, 1, "full", 4),
    Job(LLAMA, True, 8, "none", 8),
    Job(LLAMA, True, 8, "full", 32),
    Job(LLAMA, False, 1, "full", 1),  # more than an H200 has: a compiler counts it all the same
    Job(LLAMA, False, 8, "full", 32),
)
"""Without Llama 3 8B, fully trained, where everything is kept: nobody would."""


def compare(job: Job, home: Path, limit_seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan of a job, and the compiler's report."""
    planned = plan(job.experiment, "gpu", hardware.device(DEVICE))
    return planned, compiled_report(job.experiment, DEVICE, job.devices, home=home, limit_seconds=limit_seconds)


def table(home: Path, limit_seconds: float, chosen: tuple[Job, ...]) -> int:
    """Print the table; 1 if a plan is too far off, or something was not compiled."""
    print(FIGURES.format(*HEADINGS))
    worst = 0.0
    for job in chosen:
        planned, compiled = compare(job, home, limit_seconds)
        allocated = compiled["memory"]["allocated"]
        cells = [type(job.model).__name__ + f" {job.model.size}", "LoRA" if job.lora else "everything"]  # pyright: ignore[reportAttributeAccessIssue]
        cells += [str(job.devices), job.remat, str(job.rows), f"{planned['bytes_per_device'] / 2**30:.2f}"]
        if allocated is None:
            print(FIGURES.format(*cells, "-", "-", "-", "-"), compiled["problem"], flush=True)
            worst = float("inf")
            continue
        off = planned["bytes_per_device"] / allocated - 1
        worst = max(worst, abs(off))
        cells += [f"{allocated / 2**30:.2f}", f"{off:+.1%}"]
        cells += [f"{compiled[key]:.1f}" for key in ("lower_seconds", "compile_seconds")]
        print(FIGURES.format(*cells), flush=True)
    print(f"largest difference: {worst:.1%}; more than {AT_MOST:.0%} is a failure")
    return int(worst > AT_MOST)


def times() -> None:
    """Print how long whole commands take: a layout of 4,096 devices, and a plan that is compiled."""
    large = attrs.evolve(
        Job(Model.Llama3("405b"), False, 1, "full", 4096).experiment,
        batch_size=4096,
        mesh=Mesh(data=8, fsdp=64, tensor=8),
    )
    eight = Job(LLAMA, True, 8, "full", 32).experiment
    with tempfile.TemporaryDirectory() as place:
        for name, experiment, flags in (
            ("layout of Llama 3 405B, fully trained, on 4,096 devices", large, ["--dump"]),
            ("its whole plan", large, ["--device", DEVICE]),
            ("Llama 3 8B, LoRA, on 8 devices, compiled", eight, ["--device", DEVICE, "--compile"]),
            ("the same from the cache", eight, ["--device", DEVICE, "--compile"]),
        ):
            file = Path(place) / "experiment.py"
            file.write_text(to_python(experiment), encoding="utf-8")
            argv = [sys.executable, "-m", "nnxdsl", "plan", str(file), "--home", place, *flags]
            start = time.perf_counter()
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            print(f"{name:<60} {time.perf_counter() - start:6.1f} s", flush=True)


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path("runs"), help="where the compiler's reports are kept")
    parser.add_argument("--limit", type=float, default=600, help="seconds that the compiler may take for a job")
    parser.add_argument("--jobs", type=int, nargs="*", help="numbers of the rows, from 1 (default: all)")
    parser.add_argument("--layout", action="store_true", help="times instead of the table")
    options = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax"))
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores")
    if options.layout:
        times()
        return 0
    chosen = tuple(JOBS[number - 1] for number in options.jobs) if options.jobs else JOBS
    return table(options.home, options.limit, chosen)


if __name__ == "__main__":
    sys.exit(main())
