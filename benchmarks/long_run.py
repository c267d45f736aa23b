"""A run of a million steps: what it takes to add a row, to go on, and to look at the end, beside what it took at first.

    python benchmarks/long_run.py [--rows 1000000] [--json FILE]

Rows have the figures of a real DPO run. Times are the least of several tries, but for adding rows, where the median of
batches at both lengths is compared: a ratio near 1 means that length does not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nnxdsl.runs.log import Log
from nnxdsl.runs.run_dir import RunDirectory

FIGURES = (
    "loss", "grad_norm", "learning_rate", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected",
    "rewards/margins", "rewards/accuracies", "tokens/s", "pairs/s", "model_tflops/s",
)  # fmt: skip
BATCH, BATCHES = 500, 20


def row(step: int) -> dict[str, float]:
    return {"step": step, "attempt": 1, "num_tokens": step * 4096, **dict.fromkeys(FIGURES, step / 7)}


def least(act: Callable[[], object], tries: int = 5) -> float:
    """Seconds."""
    result: list[float] = []
    for _ in range(tries):
        began = time.perf_counter()
        act()
        result.append(time.perf_counter() - began)
    return min(result)


def added(run: RunDirectory, begin: int, kinds: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """Microseconds that a row of each kind takes, the median over batches, in turns."""
    result: dict[str, list[float]] = {name: [] for name in kinds}
    for batch in range(BATCHES):
        for name, append in kinds.items():
            began = time.perf_counter()
            for step in range(begin + batch * BATCH, begin + (batch + 1) * BATCH):
                append(step)
            result[name].append((time.perf_counter() - began) / BATCH * 1e6)
    return {name: statistics.median(times) for name, times in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as place:
        result = measured(Path(place), options.rows)
    for name, value in result.items():
        print(f"{name}: {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measured(place: Path, rows: int) -> dict[str, float]:
    run = RunDirectory.create(place / "run", identity="", experiment_json={}, experiment_py="")
    with Log(run.log) as log:
        sample = {"prompt": "What is a cat?", "policy": "An animal. " * 10, "reference": "A cat. " * 10}
        kinds: dict[str, Callable[[int], None]] = {
            "metrics": lambda step: run.append_metrics(row(step)),
            "samples": lambda step: run.append_sample({"step": step, **sample}),
            "events": lambda step: run._events.append({"event": "x" * 80, "step": step}),  # without its fsync
            "log": lambda step: log.write(f"step {step}/1000000, loss 0.1234, rewards/margins 1.234, 123 tokens/s"),
        }
        first = added(run, 0, kinds)
        done = BATCH * BATCHES
        for name in ("metrics", "samples", "events"):
            filled(
                run.path / f"{name}.jsonl", done, rows, row if name == "metrics" else lambda s: {"step": s, **sample}
            )
        for step in range(min(rows, 400_000)):
            log.write(f"step {step}/1000000, loss 0.1234, rewards/margins 1.234, 123 tokens/s")
        last = added(run, rows, kinds)
    run.close()
    total = rows + done
    result: dict[str, float] = {"rows": rows, "metrics, MiB": (run.path / "metrics.jsonl").stat().st_size / 2**20}
    result |= {f"{name}: us a row at 0 rows": value for name, value in first.items()}
    result |= {f"{name}: us a row at {rows:,} rows": value for name, value in last.items()}
    result |= {f"{name}: ratio": last[name] / first[name] for name in kinds}
    result["log, MiB"] = sum(path.stat().st_size for path in run.path.glob("log*.txt")) / 2**20
    result["open the run, ms"] = least(lambda: RunDirectory(run.path).status()) * 1e3

    def first_row() -> None:
        again = RunDirectory(run.path)
        again.append_metrics(row(total))
        again.close()

    result["open and add a first row, ms"] = least(first_row) * 1e3
    result["the last 100 rows, ms"] = least(lambda: RunDirectory(run.path).last_metrics(100)) * 1e3
    result["go on where all rows are wanted, ms"] = least(lambda: RunDirectory(run.path).repair_rows(2 * total)) * 1e3
    ends = iter(range(total - 500, 0, -500))
    # What is dropped is copied around: the copying is the disk's time.
    result["go on 500 steps before the end, ms"] = least(lambda: RunDirectory(run.path).repair_rows(next(ends))) * 1e3
    result["all evaluations, ms"] = least(lambda: RunDirectory(run.path).evaluations(), 2) * 1e3
    result["all rows as JSON, ms"] = least(lambda: sum(1 for _ in RunDirectory(run.path)._metrics.rows()), 1) * 1e3
    return result


def filled(path: Path, begin: int, end: int, of: Callable[[int], dict[str, object]]) -> None:
    """Adds rows in bulk: as they would be, had they been added one by one."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(of(step))}\n" for step in range(begin, end))


if __name__ == "__main__":
    main()
