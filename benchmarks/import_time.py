"""Seconds to import the language and to build a sweep of 1,000 points: `python benchmarks/import_time.py`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

IMPORT = "import nnxdsl"
SWEEP = """
import time
from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule, Sweep, from_json, product, to_json
experiment = Experiment(
    name="sweep",
    model=Model.Gemma3("1b"),
    adapter=Adapter.LoRA(),
    objective=Objective.DPO(),
    data=Data.Preferences("pairs.jsonl"),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=5e-6)),
    batch_size=64,
    steps=2_000,
)
axes = {"objective.beta": [0.01 * k for k in range(1, 101)], "adapter.rank": list(range(1, 11))}
start = time.perf_counter()
sweep = Sweep(experiment, product(axes))
built = time.perf_counter()
ids = {each.id for each in sweep}
named = time.perf_counter()
again = [from_json(to_json(each)) for each in sweep]
read = time.perf_counter()
assert len(ids) == 1_000 and again == list(sweep)
print(built - start, named - built, read - named)
"""


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print the least and the median of several fresh processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=11, help="fresh processes for each figure")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    python(IMPORT)  # so that compiled files are there
    bare = [seconds(lambda: python("pass")) for _ in range(options.repeat)]
    whole = [seconds(lambda: python(IMPORT)) for _ in range(options.repeat)]
    sweeps = [[float(part) for part in python(SWEEP).split()] for _ in range(options.repeat)]
    figures = {
        "an interpreter alone": bare,
        "an interpreter and `import nnxdsl`": whole,
        "1,000 points built and checked": [each[0] for each in sweeps],
        "their 1,000 ids": [each[1] for each in sweeps],
        "to JSON and back": [each[2] for each in sweeps],
    }
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, {options.repeat} processes for each figure")
    for name, values in figures.items():
        print(f"{name:36} min {min(values):.3f} s   median {statistics.median(values):.3f} s")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
