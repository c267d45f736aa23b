"""How long `nnxdsl plan` takes, from the command to the end of its process, where no device is.

`python benchmarks/plan_time.py` plans LoRA-DPO and full training of Llama 3 8B on 8 and on 512 H200, each several times
in a process of its own, as a person would. Nothing is kept from one to the next.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs

from nnxdsl import Adapter, Data, Experiment, Mesh, Model, Objective, Optimizer, Schedule, to_python

ROW = "{:<22} {:>8} {:>9} {:>10} {:>9} {:>7}"


@attrs.frozen
class Job:
    """One row of the table; `aim`: seconds that a plan may take."""

    lora: bool
    mesh: Mesh
    aim: float

    @property
    def experiment(self) -> Experiment:
        """DPO of Llama 3 8B, eight pairs for each device."""
        rows = 8 * self.mesh.device_count
        return Experiment(
            name="plan",
            model=Model.Llama3("8b"),
            adapter=Adapter.LoRA(rank=16) if self.lora else None,
            objective=Objective.DPO(),
            data=Data.Preferences("none.jsonl", max_prompt_length=512, max_completion_length=256),
            optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-5)),
            batch_size=rows,
            microbatch_size=rows // 4,
            steps=10,
            mesh=self.mesh,
        )


JOBS = tuple(
    Job(lora, mesh, aim)
    for mesh, aim in ((Mesh(fsdp=8), 10.0), (Mesh(data=8, fsdp=8, tensor=8), 15.0))
    for lora in (True, False)
)


def seconds(job: Job, rounds: int) -> list[float]:
    """Of so many fresh processes."""
    result = []
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "experiment.py"
        file.write_text(to_python(job.experiment), encoding="utf-8")
        argv = [sys.executable, "-m", "nnxdsl", "plan", str(file), "--home", place, "--device", "h200"]
        for _ in range(rounds):
            start = time.perf_counter()
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            result.append(time.perf_counter() - start)
    return result


def main() -> int:
    """The table; 1 if a plan takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each job")
    parser.add_argument("--json", type=Path, help="where all figures go as well")
    options = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores")
    print(ROW.format("Llama 3 8B", "devices", "of aim", "minimum s", "median s", "aim s"))
    rows: list[dict[str, Any]] = []
    for job in JOBS:
        taken = seconds(job, options.rounds)
        trained, devices = "LoRA" if job.lora else "all weights", job.mesh.device_count
        rows.append({"trained": trained, "devices": devices, "seconds": taken, "aim": job.aim})
        times = (f"{min(taken) / job.aim:.2f}", f"{min(taken):.1f}", f"{statistics.median(taken):.1f}")
        print(ROW.format(trained, devices, *times, f"{job.aim:.0f}"), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"versions": versions, "cores": os.cpu_count(), "rows": rows}, indent=1))
    return int(any(min(row["seconds"]) > row["aim"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
