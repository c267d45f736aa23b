"""Prints a plan: one screen, and optionally every array and the compiler's report. Loads no jax."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nnxdsl.terminal.array_selection import Array, array_name, by_layout, select
from nnxdsl.terminal.display import clean, duration
from nnxdsl.terminal.plan_format import (
    applied_rules,
    format_bytes,
    format_mesh,
    format_names,
    format_shape,
    format_spec,
    pluralize,
)
from nnxdsl.terminal.plan_memory_view import compiled_memory_columns, print_cut, show_memory
from nnxdsl.terminal.tables import Column, gap, grid_of, line, show_section

NO_REFERENCE = "none: the objective has no reference"
SET_BY_HAND = "set by memory.remat"
"""Why a plan has the rematerialisation that the experiment sets."""
WARNINGS_SHOWN = 3
"""Warnings that a plan prints, in a line each."""


def show_plan(plan: Mapping[str, Any], console: Console) -> None:
    """Print a plan of `nnxdsl plan --json` on one screen, and the compiler's report if there is one.

    One screen is 24 lines of 80 columns: lines are cut at the right edge rather than folded. See `show_arrays` for the
    rest.
    """
    print_cut(Text(plan["id"], "bold"), console)
    show_memory(plan, console)
    for name, text in _summary(plan):
        print_cut(Text(f"{name:11} {clean(text)}"), console)
    warnings = [f"! {w['path']}: {w['message']} [{w['kind']}]" for w in plan["warnings"]]
    for text in warnings[:WARNINGS_SHOWN]:
        print_cut(Text(clean(text), "yellow"), console)
    for text in advice(plan):
        print_cut(Text(f"→ {clean(text)}", "cyan"), console)
    if plan["compiled"]:
        gap(console)
        _show_compiled(plan, console)


def _summary(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts of a plan in fewer lines, and the estimated time."""
    rows = dict(facts(plan))
    if rows["reference"] == NO_REFERENCE:
        del rows["reference"]
    rows["steps" if "steps" in rows else "epochs"] += f", {rows.pop('tokens')} tokens" if "tokens" in rows else ""
    rows["computed in"] += f", attention {rows.pop('attention')}"
    if "slices" in rows:
        rows["mesh"] += f", slices {rows.pop('slices')}"
    if plan["activations"]:
        sizes = ", ".join(f"{name} {format_bytes(count)}" for name, count in plan["activations"].items())
        rows["remat"] = f"{plan['remat']} ({plan['remat_why']}); activations: {sizes}"
    if seconds := plan.get("step_seconds"):
        whole = f", {duration(seconds['step'] * plan['steps'])} for all steps" if plan["steps"] else ""
        parts = f"products {seconds['compute']:.2g} s, memory {seconds['memory']:.2g} s, links {seconds['links']:.2g} s"
        rows["time"] = f"about {seconds['step']:.2g} s a step by estimate{whole} ({parts})"
    return list(rows.items())


def advice(plan: Mapping[str, Any]) -> Iterator[str]:
    """What to do next, with the setting or the flag that does it."""
    verdict, device, sizes = plan["verdict"], plan["device"], plan["activations"]
    if verdict is None:
        if device is None:
            yield "does it fit? --device h200 (h100, v5e, ...) compares it with a device's memory"
    elif not verdict["fits"]:
        remedy = verdict["message"].partition("; ")[2]
        if remedy and not remedy.startswith("--search"):
            yield remedy
        yield f"a mesh on which it fits: --search --device {device['name']} --count {max(2 * plan['devices'], 8)}"
    elif plan["remat_why"] == SET_BY_HAND and plan["remat"] in sizes:
        less = list(sizes)[: list(sizes).index(plan["remat"])]  # these recompute less
        totals = {name: plan["bytes_per_device"] - sizes[plan["remat"]] + sizes[name] for name in less}
        if fitting := [name for name in less if totals[name] <= device["usable"]]:
            size = format_bytes(totals[fitting[0]])
            yield f"memory.remat=auto recomputes less where that fits: with {fitting[0]} about {size}"
    warnings = f"{pluralize(len(plan['warnings']), 'warning')}: --warnings; " if plan["warnings"] else ""
    yield f"{warnings}{pluralize(len(plan['arrays']), 'array')}: --arrays; one of them: --why PATH"


def show_arrays(plan: Mapping[str, Any], patterns: Sequence[str], console: Console) -> None:
    """Print a table of arrays, and of the activations where no array is selected.

    Args:
        plan: The plan.
        patterns: Paths, groups or patterns, as of `array_selection.select`; none for all arrays.
        console: Where to print.

    Raises:
        RunError: A pattern matches no array; names the nearest paths.
    """
    arrays: Sequence[Array] = plan["arrays"]
    if patterns:
        chosen = {id(array) for each in patterns for group in select(arrays, each)[0] for array in group}
        arrays = [array for array in arrays if id(array) in chosen]
    count = (
        pluralize(len(plan["arrays"]), "array") if not patterns else f"{len(arrays)} of {len(plan['arrays'])} arrays"
    )
    show_section(f"{count}; those of all blocks with the same layout share a row", _array_columns(arrays), console)
    if plan.get("flows") and not patterns:
        show_section("activations of one micro-batch, by logical axes", _activation_columns(plan), console)


def show_warnings(plan: Mapping[str, Any], console: Console) -> None:
    """Print the warnings of a plan in full."""
    for warning in plan["warnings"]:
        message = f"{warning['message']} [{warning['kind']}]"
        console.print(grid_of([("! warning", f"{warning['path']}: {message}")], style="yellow"))
    if not plan["warnings"]:
        console.print(line("no warnings"))


def facts(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a run does, as pairs of a name and a text."""
    total, trained = plan["parameters"]["total"], plan["parameters"]["trainable"]
    batch = f"{plan['batch_size']:,} rows in {pluralize(plan['microbatches'], 'micro-batch', 'es')}"
    if plan["steps"] is None:
        length = [("epochs", f"{plan['epochs']:g}, in steps of {batch}")]
    else:
        steps = f"{plan['steps']:,} of {batch}: {plan['rows']:,} rows"
        length = [("steps", steps), ("tokens", f"at most {plan['tokens_at_most']:,}")]
    rows = [
        *length,
        ("parameters", f"{total:,}, trained {trained:,} ({trained / total:.2%})"),
        ("computed in", f"{plan['compute']}, on {plan['platform']}"),
        ("reference", str(plan["reference"])),
        *((name, str(plan[name])) for name in ("quantization", "outer") if plan.get(name)),
        ("attention", str(plan["attention"])),
        ("mesh", format_mesh(plan["mesh"])),
    ]
    if plan["slices"] > 1:
        across = " x ".join(f"{steps} along {axis}" for axis, steps in plan["across"].items() if steps > 1)
        rows.append(("slices", f"{plan['slices']}, slow links between them: {across}"))
    return rows


def _activation_columns(plan: Mapping[str, Any]) -> list[Column]:
    """Each kind of activation, its partition by the rules, and the compiler's where the plan was compiled."""
    rows = plan["flows"]
    compiled = {_activation(row): format_spec(row["spec"]) for row in (plan["compiled"] or {}).get("flows") or ()}
    columns = [
        Column("axes", [format_names(row["axes"]) for row in rows], least=16),
        Column("shape", [format_shape(row["shape"]) for row in rows]),
        Column("partition", [format_spec(row["spec"]) for row in rows], least=10),
        Column("per device", [format_shape(row["device_shape"]) for row in rows], rank=1),
    ]
    if compiled:
        columns.append(Column("as compiled", [compiled.get(_activation(row), "not met") for row in rows], least=10))
    return columns


def _activation(row: Mapping[str, Any]) -> str:
    return json.dumps([row["axes"], row["shape"]])


def _array_columns(arrays: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The table of arrays; those of a group and a part that have the same layout share a row."""
    groups = by_layout(arrays, lambda array: array["part"])
    first = [group[0] for group in groups]
    parts = [
        array["part"] if array["memory"] == "device" else f"{array['part']} ({array['memory']})" for array in first
    ]
    sizes = [format_bytes(sum(array["device_bytes"] for array in group)) for group in groups]
    return [
        Column("part", parts, rank=2, least=9),
        Column("path", [array_name(group) for group in groups], least=26),
        Column("axes", [format_names(array["axes"]) for array in first], rank=9, spare=True),
        Column("shape", [format_shape(array["shape"]) for array in first], rank=4),
        Column("dtype", [array["dtype"] for array in first], rank=7),
        Column("partition", [format_spec(array["spec"]) for array in first], least=12),
        Column("per device", [format_shape(array["device_shape"]) for array in first], rank=3),
        Column("copies", [f"x{array['replicas']}" for array in first], rank=5, right=True),
        Column("rules", [", ".join(applied_rules(array)) for array in first], rank=6, least=24),
        Column("arrays", [str(len(group)) for group in groups], rank=8, right=True),
        Column("size", sizes, rank=1, right=True),
    ]


def _show_compiled(plan: Mapping[str, Any], console: Console) -> None:
    compiled = plan["compiled"]
    versions = ", ".join(f"{name} {version}" for name, version in (compiled.get("versions") or {}).items())
    target = f"{pluralize(compiled.get('count') or plan['devices'], 'device')} ({compiled.get('device')})"
    console.print(line(f"compiled for {target}{f' with {versions}' if versions else ''}", "bold"))
    if compiled.get("problem"):
        console.print(line(f"✘ would not run: {compiled['problem']}", "bold red"))
    seconds = [
        f"{verb} in {compiled[key]:.1f} s"
        for verb, key in (("lowered", "lower_seconds"), ("compiled", "compile_seconds"))
        if compiled.get(key) is not None
    ]
    if seconds:
        console.print(line(", ".join(seconds) + (", from the cache" if compiled.get("cached") else "")))
    if any(count is not None for count in (compiled.get("memory") or {}).values()):
        show_section("memory on each device, as planned and as compiled", compiled_memory_columns(plan), console)
    if compiled.get("collectives"):
        show_section("collectives of a step", _collective_columns(compiled["collectives"]), console)
    elif compiled.get("collectives") is not None and not compiled.get("problem"):
        console.print(line("no collectives: the devices do not communicate"))


def _collective_columns(collectives: Sequence[Mapping[str, Any]]) -> list[Column]:
    rows = sorted(collectives, key=lambda row: -row["bytes"])
    return [
        Column("kind", [row["kind"] for row in rows]),
        Column("count", [f"{row['count']:,}" for row in rows], right=True),
        Column("size", [format_bytes(row["bytes"]) for row in rows], right=True),
        Column("where", ["in a loop, every iteration" if row["in_loop"] else "once a step" for row in rows], least=12),
    ]
