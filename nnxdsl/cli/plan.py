"""What `plan`, and `diff --layout`, do and print; the words themselves are parsed in `nnxdsl/cli/dispatch.py`."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import Mesh
from nnxdsl.errors import RunError
from nnxdsl.planning.aot_process import compiled_report
from nnxdsl.planning.plan import describe, plan
from nnxdsl.planning.search import Found, search
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.sharding import hardware
from nnxdsl.sharding.layout import Layout
from nnxdsl.terminal.array_view import draw as draw_grid
from nnxdsl.terminal.plan_view import mesh_words, show_plan, show_why

WIDE = 160
"""Columns of a plan where there is no terminal to fold it for."""

SHOWN = 8
"""Placements that a search prints."""


@attrs.frozen(kw_only=True)
class PlanArgs:
    """What of a plan is wanted.

    Attributes:
        device: Name of the device that it is meant for.
        count: How many of them.
        compile: Whether to compile it for them.
        search: Whether to look for the best placement.
        why: Path of the one array whose rules are wanted.
        draw: Path of the one array whose picture is wanted.
        dump: Whether the text of the layout is wanted.
        as_json: Whether it is for machines.
        limit: Seconds that a compiler may take.
        home: Directory of all runs, where compilers' reports are kept.
    """

    device: str | None = None
    count: int | None = None
    compile: bool = False
    search: bool = False
    why: str | None = None
    draw: str | None = None
    dump: bool = False
    as_json: bool = False
    limit: int = 300
    home: Path = Path("runs")


def plan_command(experiment: Experiment, asked: PlanArgs) -> int:
    """Print the plan of an experiment, or the part of it that is asked for.

    Raises:
        PlanError: with everything that does not fit.
        RunError: a compiler that is not installed, or words that do not go together.
    """
    device = None if asked.device is None else hardware.device(asked.device)
    if asked.compile and device is not None and device.name not in hardware.DEVICES:
        raise RunError(f"{device.name}: a compiler knows devices of the catalogue; leave the memory or --compile out")
    platform = _platform() if device is None else device.platform
    jax.config.update("jax_platforms", "cpu")  # a plan must not take memory from a run on the same machine
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    if asked.search:
        return _search(experiment, asked, device, console)
    experiment = _on_so_many(experiment, asked.count)
    if asked.dump or asked.why is not None or asked.draw is not None:
        _show_layout(build_blueprint(experiment, platform).layout, asked, console)
        return 0
    found = plan(experiment, platform, device)
    if asked.compile:
        found["compiled"] = _compiled(experiment, asked, device or hardware.device("cpu"))
    if asked.as_json:
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show_plan(found, console)
    return 0


def _show_layout(layout: Layout, asked: PlanArgs, console: Console) -> None:
    """What is asked of where arrays lie, for which nothing of memory need be found out."""
    if asked.why is not None:
        show_why(describe(layout), asked.why, console)
    elif asked.draw is not None:
        draw_grid(describe(layout), asked.draw, console)
    else:
        sys.stdout.write(layout.dump())


def diff_layouts(left: Experiment, right: Experiment, *, as_json: bool) -> int:
    """Print the lines in which two layouts differ, as `diff -U0` does."""
    platform = _platform()
    jax.config.update("jax_platforms", "cpu")
    texts = [build_blueprint(experiment, platform).layout.dump().splitlines() for experiment in (left, right)]
    if as_json:
        json.dump({"same": texts[0] == texts[1], "left": texts[0], "right": texts[1]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    names = [f"{experiment.id} on {mesh_words(experiment.mesh.sizes)}" for experiment in (left, right)]
    changes = difflib.unified_diff(texts[0], texts[1], names[0], names[1], n=0, lineterm="")
    lines = [line for line in changes if not line.startswith("@@")]
    sys.stdout.writelines(f"{line}\n" for line in lines or ["# the same layout"])
    return 0


def _on_so_many(experiment: Experiment, count: int | None) -> Experiment:
    """The experiment on `count` devices: as its mesh says, or cut over `fsdp` where it says nothing."""
    needed = experiment.mesh.device_count
    if count is None or count == needed:
        return experiment
    if needed == 1 and all(mesh_size == 1 for mesh_size in experiment.mesh.sizes.values()):
        sys.stderr.write(f"# the mesh says nothing of {count} devices: planned with mesh.fsdp={count}\n")
        return evolve(experiment, {"mesh.fsdp": count})
    sizes = " x ".join(f"{axis}={count}" for axis, count in experiment.mesh.sizes.items() if count > 1)
    raise RunError(
        f"--count {count}: the mesh takes {needed} devices ({sizes}); change it, or look for one with --search"
    )


def _compiled(experiment: Experiment, asked: PlanArgs, device: hardware.Device) -> dict[str, Any]:
    console = Console(stderr=True, highlight=False)
    with console.status(f"compiling for {experiment.mesh.device_count} x {device.description}"):
        return compiled_report(
            experiment, device.name, experiment.mesh.device_count, home=asked.home, limit_seconds=asked.limit
        )


def _search(experiment: Experiment, asked: PlanArgs, device: hardware.Device | None, console: Console) -> int:
    if device is None or asked.count is None:
        raise RunError("--search needs --device and --count: --search --device h200 --count 8")
    errors = Console(stderr=True)
    columns = TextColumn("meshes"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("meshes")
        found, tried = search(
            experiment,
            device,
            asked.count,
            told=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if asked.as_json:
        rows = [
            {"changes": one.changes, "bytes_per_device": one.bytes, "step_seconds": attrs.asdict(one.cost)}
            for one in found
        ]
        json.dump({"device": device.name, "count": asked.count, "tried": tried, "fit": rows}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    name = f"{asked.count} x {device.description}"
    if not found:
        console.print(f"none of {tried} placements on {name} fits; try quantization, an adapter, or shorter rows")
        return 0
    console.print(f"{len(found)} of {tried} placements on {name} fit; the quickest, by estimate:")
    console.print("  s/step   products     memory      links   GiB/device", style="bold")
    for one in found[:SHOWN]:
        times = f"{one.cost.step:8.3g} {one.cost.compute:10.3g} {one.cost.memory:10.3g} {one.cost.links:10.3g}"
        console.print(f"{times} {one.bytes / 2**30:12.1f}   {_words(one, experiment)}", soft_wrap=True)
    return 0


def _words(found: Found, experiment: Experiment) -> str:
    """What to paste: only what differs from the defaults or from what the experiment says."""
    default = {**{f"mesh.{axis}": 1 for axis in Mesh().sizes}, "microbatch_size": None}
    said = {
        **{f"mesh.{axis}": n for axis, n in experiment.mesh.sizes.items()},
        "microbatch_size": experiment.microbatch_size,
    }
    words = [
        f"{path}={render(value).strip(chr(34))}"
        for path, value in found.changes.items()
        if value != default.get(path, object()) or value != said.get(path, value)
    ]
    return " ".join(words)


def _platform() -> str:
    """Where this machine would run: "cpu", "gpu" or "tpu"; found without starting a device."""
    asked = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if asked:
        return {"cuda": "gpu", "rocm": "gpu"}.get(asked, asked)
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
    if any(map(importlib.util.find_spec, plugins)) and any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):
        return "gpu"
    return "tpu" if importlib.util.find_spec("libtpu") and any(Path("/dev").glob("accel*")) else "cpu"
