"""Prints the partition and the dimensions of an array, and every sharding rule that was tried for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from nnxdsl.terminal.array_selection import Array, array_name, select
from nnxdsl.terminal.plan_format import (
    format_axes,
    format_bytes,
    format_mesh,
    format_shape,
    format_spec,
    mesh_axes,
    pluralize,
)
from nnxdsl.terminal.tables import Column, gap, grid_of, line, show_section, show_table


def show_why(plan: Mapping[str, Any], path: str, console: Console) -> None:
    """Print why an array has its partition: its dimensions, and every rule that was tried.

    If the path (see `select`) matches arrays with different layouts, they are listed.

    Raises:
        RunError: No array matches; names the nearest paths.
    """
    for array in show_selected(plan, path, console):
        show_section("dimensions", _dimension_columns(array, plan["mesh"]), console)
        if array["why"]:
            show_section("rules for these axes, in order", _rule_columns(array["why"]), console)
        else:
            gap(console)
            console.print(line("no rules: every device holds the whole array"))


def show_selected(plan: Mapping[str, Any], path: str, console: Console) -> Iterator[Array]:
    """Print each array that a path means, and yield it for more to be printed; list them if their layouts differ.

    Raises:
        RunError: No array matches; names the nearest paths.
    """
    groups, exact = select(plan["arrays"], path)
    if len(groups) > 1 and not exact:
        _show_choice(path, groups, console)
        return
    for number, group in enumerate(groups):
        if number:
            gap(console)
        _show_array(group, plan["mesh"], console)
        yield group[0]


def _show_array(group: Sequence[Array], mesh: Mapping[str, int], console: Console) -> None:
    """Print the shape and partition of an array; `group` has it first, then others with the same layout."""
    array = group[0]
    console.print(line(f"{array['path']}  ({array['part']})", "bold"))
    memory = "" if array["memory"] == "device" else f", in the {array['memory']}'s memory"
    replicas = array["replicas"]
    copies = "no copies" if replicas == 1 else f"x{replicas}: {replicas} devices hold the same block"
    device_size = f"{format_shape(array['device_shape'])}, {format_bytes(array['device_bytes'])}"
    rows = [
        ("array", f"{array['dtype']} {format_shape(array['shape'])}, {format_bytes(array['bytes'])}"),
        ("mesh", format_mesh(mesh)),
        ("partition", format_spec(array["spec"])),
        ("each device", f"{device_size}{memory}; {copies}"),
    ]
    if len(group) > 1:
        # One group may be in several parts: a reference has the layout of the weights that it is a copy of.
        parts = ", ".join(dict.fromkeys(other["part"] for other in group))
        rows.append(("same layout", f"{pluralize(len(group) - 1, 'other')} of {array['group']} ({parts})"))
    console.print(grid_of(rows))


def _show_choice(path: str, groups: Sequence[Sequence[Array]], console: Console) -> None:
    console.print(line(f"'{path}' matches arrays with {len(groups)} different layouts; use one of these paths:"))
    first = [group[0] for group in groups]
    names = [array_name(group) for group in groups]
    paths = [
        f"{array['part']}:{name}" if names.count(name) > 1 else name for array, name in zip(first, names, strict=True)
    ]
    columns = [
        Column("path", paths, least=30),
        Column("part", [array["part"] for array in first], rank=2),
        Column("shape", [format_shape(array["shape"]) for array in first], rank=1),
        Column("partition", [format_spec(array["spec"]) for array in first], rank=4, least=14),
        Column("arrays", [str(len(group)) for group in groups], rank=3, right=True),
    ]
    show_table(columns, console)


def _dimension_columns(array: Array, mesh: Mapping[str, int]) -> list[Column]:
    over = [" x ".join(f"{axis}={mesh[axis]}" for axis in mesh_axes(entry)) or "-" for entry in array["spec"]]
    return [
        Column("dimension", [str(number) for number in range(len(array["shape"]))]),
        Column("name", [axis or "-" for axis in array["axes"]]),
        Column("size", [f"{length:,}" for length in array["shape"]], right=True),
        Column("cut over", over, least=14),
        Column("per device", [f"{length:,}" for length in array["device_shape"]], right=True),
    ]


def _rule_columns(tried: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [
        Column("rule", ["-" if rule["rule"] is None else f"#{rule['rule']}" for rule in tried], right=True),
        Column("dimension", [f"{rule['dimension']} {rule['logical']}" for rule in tried], least=12),
        Column("mesh axes", [format_axes(rule["axes"]) for rule in tried], least=12),
        Column("outcome", [f"{'✔' if rule['outcome'] == 'taken' else '·'} {rule['outcome']}" for rule in tried]),
        Column("why", [rule["why"] for rule in tried], least=16),
    ]
