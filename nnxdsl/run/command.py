"""What the commands `run` and `plan` do and print; the words themselves are parsed in `nnxdsl/cli.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from nnxdsl.program.plan import plan
from nnxdsl.run.attempt import Outcome, TrainingError
from nnxdsl.run.display import Display
from nnxdsl.run.loop import run
from nnxdsl.spec.experiment import Experiment

FAILED = 1
"""Exit code when training failed; what was saved last is whole."""

WIDE = 160
"""Columns of a plan where there is no terminal to fold it for."""

FIRST_ROWS = ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")


def run_command(experiment: Experiment, home: Path, *, quiet: bool, restart: bool, as_json: bool) -> int:
    """Run an experiment, show how it ended, and return the process's exit code.

    0: finished, or stopped on request through the run directory. 1: training failed. 130 and 143: stopped by SIGINT and
    SIGTERM, all saved.
    """
    display = Display(quiet=quiet)
    try:
        with display:
            outcome = run(experiment, home, display, restart=restart)
    except TrainingError as error:
        sys.stderr.write(f"TrainingError: {error}\n")
        return FAILED
    show_outcome(outcome, display)
    if as_json:
        json.dump({**_plain(outcome), "id": experiment.id}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    return 0 if outcome.signal is None else 128 + outcome.signal


def show_outcome(outcome: Outcome, display: Display) -> None:
    """The table at the end, and the answers side by side."""
    for sample in outcome.samples:
        if sample.reference is None:
            display.say(f"{sample.prompt}\n    {sample.policy}")
        else:
            display.side_by_side(sample.prompt, sample.policy, sample.reference)
    if outcome.evaluations:
        first, last = min(outcome.evaluations), max(outcome.evaluations)
        names = [f"eval/{name}" for name in FIRST_ROWS if f"eval/{name}" in outcome.evaluations[last]]
        names += sorted(set(outcome.evaluations[last]) - set(names))
        rows = [
            {
                "held out": name,
                **{f"step {step}": outcome.evaluations[step].get(name) for step in dict.fromkeys((first, last))},
            }
            for name in names
        ]
        display.final_table(rows)
    display.say(f"{outcome.state} at step {outcome.step}: {outcome.directory}")


def plan_command(experiment: Experiment, *, as_json: bool) -> int:
    """Print the plan of an experiment."""
    platform = _platform()
    jax.config.update("jax_platforms", "cpu")  # a plan must not take memory from a run on the same machine
    found = plan(experiment, platform)
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    total, trained = found["parameters"]["total"], found["parameters"]["trainable"]
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("steps", f"{found['steps']:,} of {experiment.batch_size:,} rows in {found['microbatches']} micro-batch(es)"),
        ("tokens", f"at most {found['tokens_at_most']:,}"),
        ("parameters", f"{total:,}, trained {trained:,} ({trained / total:.2%})"),
        ("computed in", f"{found['compute']}, on {platform}"),
        ("reference", found["reference"]),
        ("mesh", " x ".join(f"{axis}={size}" for axis, size in found["mesh"].items())),
    ):
        facts.add_row(name, value)
    console.print(f"[bold]{found['id']}[/bold]")
    console.print(facts)
    console.print(_memory_table(found))
    console.print(_array_table(found))
    return 0


def _platform() -> str:
    """Where this machine would run: "cpu", "gpu" or "tpu"; found without starting a device."""
    asked = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if asked:
        return {"cuda": "gpu", "rocm": "gpu"}.get(asked, asked)
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
    if any(map(importlib.util.find_spec, plugins)) and any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):
        return "gpu"
    return "tpu" if importlib.util.find_spec("libtpu") and any(Path("/dev").glob("accel*")) else "cpu"


def _memory_table(found: dict[str, Any]) -> Table:
    table = Table(title="memory on each device", title_justify="left")
    for name, justify in (("part", "left"), ("MiB", "right"), ("", "left"), ("reckoning", "left")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    for part in found["memory"]:
        table.add_row(part["name"], f"{part['bytes'] / 2**20:,.2f}", part["tag"], part["how"])
    table.add_section()
    table.add_row("total", f"{found['bytes_per_device'] / 2**20:,.2f}", "", "")
    return table


def _array_table(found: dict[str, Any]) -> Table:
    """Arrays that differ only in the number of their block stand in one row."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for array in found["arrays"]:
        spec = ", ".join("-" if a is None else a if isinstance(a, str) else "+".join(a) for a in array["spec"])
        shape, device = ("x".join(map(str, array[name])) or "scalar" for name in ("shape", "device_shape"))
        path = re.sub(r"\bblocks\.\d+\.", "blocks.*.", array["path"])
        alike.setdefault((array["part"], path, shape, array["dtype"], spec or "-", device), []).append(array)
    table = Table(title=f"{len(found['arrays'])} arrays", title_justify="left")
    for name in ("part", "path", "shape", "dtype", "partition", "on each device"):
        table.add_column(name, overflow="fold")
    table.add_column("arrays", justify="right")
    table.add_column("MiB", justify="right")
    for row, arrays in alike.items():
        path = arrays[0]["path"] if len(arrays) == 1 else row[1]
        size = sum(array["device_bytes"] for array in arrays) / 2**20
        table.add_row(row[0], path, *row[2:], str(len(arrays)), f"{size:,.3f}")
    return table


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "directory": str(outcome.directory),
        "state": outcome.state,
        "step": outcome.step,
        "evaluations": {str(step): metrics for step, metrics in outcome.evaluations.items()},
        "samples": [sample._asdict() for sample in outcome.samples],
    }
