"""The memory of a plan on a terminal: a bar with a letter for each part, and tables. Loads no jax."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nnxdsl.terminal.display import clean
from nnxdsl.terminal.plan_format import PALETTE, format_bytes
from nnxdsl.terminal.tables import Column, gap, line, show_section

FREE, RESERVED = "·", "▒"
"""Cells of the bar: free memory, and memory that the device's runtime reserves."""


def show_memory(plan: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, the bar and the parts of a plan's memory, on the device and on the host."""
    device, verdict, total = plan["device"], plan["verdict"], plan["bytes_per_device"]
    on_device, on_host = ([part for part in plan["memory"] if part["memory"] == name] for name in ("device", "host"))
    if device and verdict:
        style, sign = ("bold green", "✔") if verdict["fits"] else ("bold red", "✘")
        share = f"{verdict['share']:.0%} of what is usable on {device['description']}"
        console.print(line(f"{sign} {verdict['message']}; {share}", style))
    budget = device if device and device["memory"] else None  # the memory of a CPU is not in the catalogue
    console.print(memory_bar(on_device, total, budget, min(console.width, 120)))
    show_section("memory on each device", _part_columns(on_device, total), console)
    if on_host:
        columns = _part_columns(on_host, plan["host_bytes_per_device"])
        show_section("memory of the host, for each device", columns, console)
    if plan["activations"]:
        gap(console)
        why = {plan["remat"]: f" ({plan['remat_why']})"}
        policies = [f"{name} {format_bytes(count)}{why.get(name, '')}" for name, count in plan["activations"].items()]
        console.print(line(f"activations by rematerialisation: {', '.join(policies)}"))


def _part_columns(parts: Sequence[Mapping[str, Any]], total: int) -> list[Column]:
    return [
        Column("part", [*(part["name"] for part in parts), "total"]),
        Column("size", [format_bytes(count) for count in (*(part["bytes"] for part in parts), total)], right=True),
        Column("", [*(part["tag"] for part in parts), ""], rank=1),
        Column("basis", [*(part["how"] for part in parts), ""], rank=2, least=16),
    ]


def memory_bar(parts: Sequence[Mapping[str, Any]], total: int, device: Mapping[str, Any] | None, width: int) -> Text:
    """A bar of a device's memory with a letter for each part, and its legend.

    Without a device, or where the parts exceed its memory, the bar is as long as their sum.

    Args:
        parts: With `name` and `bytes`.
        total: The sum of their bytes.
        device: With `memory` and `usable`, in bytes.
        width: Columns of the terminal.
    """
    cells = max(width - 2, 8)
    whole = max(total, device["memory"] if device else 0, 1)
    segments = [
        (letter, f"black on {colour}", part["name"], part["bytes"])
        for letter, colour, part in zip(
            letters([part["name"] for part in parts]), itertools.cycle(PALETTE), parts, strict=False
        )
    ]
    if device:
        usable = min(device["usable"], device["memory"])
        free, reserved = max(usable - total, 0), device["memory"] - max(usable, min(total, device["memory"]))
        segments += [(FREE, "", "free", free), (RESERVED, "dim", "not usable", reserved)]
    segments = [segment for segment in segments if segment[3] > 0]
    text = Text("▕", end="")
    for (sign, style, _, _), count in zip(segments, _split(cells, [s[3] / whole for s in segments]), strict=True):
        text.append(sign * count, style)
    text.append("▏\n")
    if device:
        text.append(_usable_pointer(device["usable"], whole, cells, width))
    _append_legend(text, segments, width)
    return text


def _usable_pointer(usable: int, whole: int, cells: int, width: int) -> str:
    """The line under the bar that points to the end of the usable memory."""
    column = min(round(cells * usable / whole), cells - 1) + 1
    label = f"usable: {format_bytes(usable)}"
    if column + len(label) + 2 <= width:
        return " " * column + f"▲ {label}\n"
    return f"{label} ▲".rjust(column + 1) + "\n"


def _append_legend(text: Text, segments: Sequence[tuple[str, str, str, int]], width: int) -> None:
    column = 0
    for sign, style, name, count in segments:
        label = f" {clean(name)} {format_bytes(count)}"
        if column and column + 3 + len(label) > width:
            text.append("\n")
            column = 0
        text.append("  " if column else "")
        text.append(sign, style)
        text.append(label)
        column += len(label) + 3


def letters(names: Sequence[str]) -> list[str]:
    """A letter of its own for each name: its first one that is free, else any."""
    taken: list[str] = []
    for name in names:
        wanted = [*name.upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
        taken.append(next((sign for sign in wanted if sign.isalnum() and sign not in taken), "?"))
    return taken


def _split(cells: int, shares: Sequence[float]) -> list[int]:
    """Cells of a bar by share: at least one for each, the remainder by the largest rounding error."""
    counts = [max(int(share * cells), 1) for share in shares]
    while counts and sum(counts) != cells:
        step = 1 if sum(counts) < cells else -1
        order = sorted(range(len(counts)), key=lambda index: step * (shares[index] * cells - counts[index]))
        movable = [index for index in order if counts[index] + step >= 1]
        if not movable:
            break
        counts[movable[-1]] += step
    return counts


def compiled_memory_columns(plan: Mapping[str, Any]) -> list[Column]:
    """Planned against compiled memory: the layout's arrays are XLA's arguments, the estimates its temporaries.

    Of a program that is too large the compiler reports less; rows without a figure are left out.
    """
    measured = plan["compiled"]["memory"]
    on_device = [part for part in plan["memory"] if part["memory"] == "device"]
    placed = sum(part["bytes"] for part in on_device if part["tag"] == "exact")
    estimated = sum(part["bytes"] for part in on_device) - placed
    beside, total = None, None
    if measured["outputs"] is not None:
        beside = max(measured["outputs"] - measured["aliased"], 0)
        total = measured["arguments"] + measured["temporaries"] + beside
    figures: list[tuple[str, int | None, int | None]] = [
        ("arrays and batch (arguments)", placed, measured["arguments"]),
        ("while computing (temporaries)", estimated, measured["temporaries"]),
        ("outputs beside the arguments", None, beside),
        ("sum", plan["bytes_per_device"], total),
        ("peak (reported by XLA)", None, measured["peak"]),
    ]
    if measured["host"] or plan["host_bytes_per_device"]:
        figures.append(("in the host's memory", plan["host_bytes_per_device"], measured["host"]))
    rows = [(name, planned, count) for name, planned, count in figures if count is not None]
    return [
        Column("", [name for name, _, _ in rows], least=16),
        Column("planned", ["" if planned is None else format_bytes(planned) for _, planned, _ in rows], right=True),
        Column("measured", [format_bytes(count) for _, _, count in rows], right=True),
        Column("difference", [f"{n / planned - 1:+.1%}" if planned else "" for _, planned, n in rows], right=True),
    ]
