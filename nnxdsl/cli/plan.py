"""Implementation of `plan` and `diff --layout`."""

from __future__ import annotations

import difflib
import json
import sys
from argparse import Namespace
from typing import Any

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import Mesh
from nnxdsl.errors import RunError
from nnxdsl.planning.aot_process import compiled_report
from nnxdsl.planning.plan import describe, plan
from nnxdsl.planning.search import Placement, search
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.runtime.backend import use_cpu
from nnxdsl.runtime.xla_flags import platform as local_platform
from nnxdsl.sharding import hardware
from nnxdsl.sharding.layout import Layout
from nnxdsl.terminal.array_rules_view import show_why
from nnxdsl.terminal.array_view import draw as draw_grid
from nnxdsl.terminal.plan_format import format_mesh
from nnxdsl.terminal.plan_view import show_arrays, show_plan, show_warnings

WIDE = 160
"""Width of a plan, in columns, if standard output is not a terminal."""

SHOWN = 8
"""Number of placements that --search prints."""

DEFAULT_LIMIT_SECONDS = 300
"""Default time limit of --compile."""


def plan_command(experiment: Experiment, args: Namespace) -> int:
    """Print the plan of an experiment, or the part of it that the flags select.

    Args:
        experiment: The experiment.
        args: Arguments declared by `nnxdsl/cli/verbs/plan.py`.

    Raises:
        PlanError: lists everything that does not fit.
        RunError: the compiler is not installed, or flags contradict each other.
    """
    device = None if args.device is None else hardware.device(args.device)
    if args.compile and device is not None and device.name not in hardware.DEVICES:
        raise RunError(
            f"{device.name}: only devices of the catalogue can be compiled for; leave the memory or --compile out"
        )
    platform = local_platform() if device is None else device.platform
    use_cpu()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    if args.search:
        return _search(experiment, args, device, console)
    experiment = _with_device_count(experiment, args.count)
    if args.dump or args.why is not None or args.draw is not None:
        _show_layout(build_blueprint(experiment, platform).layout, args, console)
        return 0
    with Console(stderr=True, highlight=False).status("planning"):
        report = plan(experiment, platform, device)
    if args.compile:
        report["compiled"] = _compiled(experiment, args, device or hardware.device("cpu"))
    if args.json:
        json.dump(report, sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif args.warnings:
        show_warnings(report, console)
    else:
        if not args.match:
            show_plan(report, console)
        if args.arrays or args.match:
            show_arrays(report, args.match or (), console)
    return 0


def _show_layout(layout: Layout, args: Namespace, console: Console) -> None:
    """Print a part of the layout, without computing the memory plan."""
    if args.why is not None:
        show_why(describe(layout), args.why, console)
    elif args.draw is not None:
        draw_grid(describe(layout), args.draw, console)
    else:
        sys.stdout.write(layout.dump())


def diff_layouts(left: Experiment, right: Experiment, *, as_json: bool) -> int:
    """Print the differing lines of two layouts, as `diff -U0` does."""
    platform = local_platform()
    use_cpu()
    texts = [build_blueprint(experiment, platform).layout.dump().splitlines() for experiment in (left, right)]
    if as_json:
        json.dump({"same": texts[0] == texts[1], "left": texts[0], "right": texts[1]}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    names = [f"{experiment.id} on {format_mesh(experiment.mesh.sizes)}" for experiment in (left, right)]
    changes = difflib.unified_diff(texts[0], texts[1], names[0], names[1], n=0, lineterm="")
    lines = [line for line in changes if not line.startswith("@@")]
    sys.stdout.writelines(f"{line}\n" for line in lines or ["# the same layout"])
    return 0


def _with_device_count(experiment: Experiment, count: int | None) -> Experiment:
    """The experiment on `count` devices: with its own mesh, or with `mesh.fsdp=count` if its mesh has one device."""
    needed = experiment.mesh.device_count
    if count is None or count == needed:
        return experiment
    if needed == 1 and all(mesh_size == 1 for mesh_size in experiment.mesh.sizes.values()):
        sys.stderr.write(f"# mesh has 1 device; planning with mesh.fsdp={count}\n")
        return evolve(experiment, {"mesh.fsdp": count})
    sizes = " x ".join(f"{axis}={count}" for axis, count in experiment.mesh.sizes.items() if count > 1)
    raise RunError(
        f"--count {count}: the mesh has {needed} devices ({sizes}); change the mesh, or find one with --search"
    )


def _compiled(experiment: Experiment, args: Namespace, device: hardware.Device) -> dict[str, Any]:
    console = Console(stderr=True, highlight=False)
    with console.status(f"compiling for {experiment.mesh.device_count} x {device.description}"):
        return compiled_report(
            experiment,
            device.name,
            experiment.mesh.device_count,
            home=args.home,
            limit_seconds=args.limit or DEFAULT_LIMIT_SECONDS,
        )


def _search(experiment: Experiment, args: Namespace, device: hardware.Device | None, console: Console) -> int:
    if device is None or args.count is None:
        raise RunError("--search needs --device and --count: --search --device h200 --count 8")
    errors = Console(stderr=True)
    columns = TextColumn("meshes"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("meshes")
        fitting, tried = search(
            experiment,
            device,
            args.count,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if args.json:
        rows = [
            {"changes": one.changes, "bytes_per_device": one.bytes, "step_seconds": attrs.asdict(one.cost)}
            for one in fitting
        ]
        json.dump({"device": device.name, "count": args.count, "tried": tried, "fit": rows}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    name = f"{args.count} x {device.description}"
    if not fitting:
        console.print(f"none of {tried} placements on {name} fits; try quantization, an adapter, or shorter rows")
        return 0
    console.print(f"{len(fitting)} of {tried} placements on {name} fit; the fastest, by estimate:")
    console.print("  s/step   products     memory      links   GiB/device", style="bold")
    for one in fitting[:SHOWN]:
        times = f"{one.cost.step:8.3g} {one.cost.compute:10.3g} {one.cost.memory:10.3g} {one.cost.links:10.3g}"
        console.print(f"{times} {one.bytes / 2**30:12.1f}   {_overrides(one, experiment)}", soft_wrap=True)
    return 0


def _overrides(placement: Placement, experiment: Experiment) -> str:
    """`path=value` arguments for a placement, where it differs from the defaults or from the experiment."""
    default = {**{f"mesh.{axis}": 1 for axis in Mesh().sizes}, "microbatch_size": None}
    current = {
        **{f"mesh.{axis}": n for axis, n in experiment.mesh.sizes.items()},
        "microbatch_size": experiment.microbatch_size,
    }
    overrides = [
        f"{path}={render(value).strip(chr(34))}"
        for path, value in placement.changes.items()
        if value != default.get(path, object()) or value != current.get(path, value)
    ]
    return " ".join(overrides)
