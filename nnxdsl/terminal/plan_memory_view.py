"""Prints the memory of a plan: a bar with a letter for each part, and a line for each. Loads no jax."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nnxdsl.terminal.display import clean
from nnxdsl.terminal.plan_format import PALETTE, format_bytes
from nnxdsl.terminal.tables import Column

FREE, RESERVED = "·", "▒"
"""Cells of the bar: free memory, and memory that the device's runtime reserves."""


def show_memory(plan: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, the bar and the parts of a plan's memory, in a line each."""
    device, verdict = plan["device"], plan["verdict"]
    if device and verdict:
        style, sign = ("bold green", "✔") if verdict["fits"] else ("bold red", "✘")
        message = verdict["message"].partition("; ")[0]  # then comes the remedy
        print_cut(Text(f"{sign} {message} ({verdict['share']:.0%} of {device['description']})", style), console)
    on_device = [part for part in plan["memory"] if part["memory"] == "device" and part["bytes"]]
    budget = device if device and device["memory"] else None  # the memory of a CPU is not in the catalogue
    width = min(console.width, 120)
    segments = _segments(on_device)
    console.print(memory_bar(segments, plan["bytes_per_device"], budget, width), end="")
    for row in _parts(plan, segments):
        print_cut(row, console)


def _parts(plan: Mapping[str, Any], segments: Sequence[Segment]) -> Iterator[Text]:
    """A line for each part, with its letter in the bar; those in the host's memory have none."""
    marks = {name: (letter, style) for letter, style, name, _ in segments}
    rows: list[tuple[tuple[str, str], str, int, str]] = []
    for part in plan["memory"]:
        if part["bytes"]:
            is_here = part["memory"] == "device"
            name, basis = part["name"], f"{part['tag']}: {part['formula']}"
            rows.append(
                (marks[name], name, part["bytes"], basis)
                if is_here
                else ((" ", ""), f"{name} (host)", part["bytes"], basis)
            )
    rows.append((("=", "bold"), "on each device", plan["bytes_per_device"], ""))
    width = max(len(name) for _, name, _, _ in rows)
    for mark, name, count, basis in rows:
        yield Text.assemble(mark, f" {clean(name):{width}}  {format_bytes(count):>9}", (f"  {clean(basis)}", "dim"))


def print_cut(text: Text, console: Console) -> None:
    """Print one line, cut at the right edge."""
    console.print(text, no_wrap=True, overflow="ellipsis")


Segment = tuple[str, str, str, int]
"""A part in the bar: its letter, its style, its name, its bytes."""


def _segments(parts: Sequence[Mapping[str, Any]]) -> list[Segment]:
    styles = (f"black on {colour}" for colour in itertools.cycle(PALETTE))
    names = [part["name"] for part in parts]
    return [
        (letter, style, part["name"], part["bytes"])
        for letter, style, part in zip(letters(names), styles, parts, strict=False)
    ]


def memory_bar(parts: Sequence[Segment], total: int, device: Mapping[str, Any] | None, width: int) -> Text:
    """A bar of a device's memory with a letter for each part, and a pointer to the end of what is usable.

    Without a device, or where the parts exceed its memory, the bar is as long as their sum.

    Args:
        parts: What the memory holds.
        total: The sum of their bytes.
        device: With `memory` and `usable`, in bytes.
        width: Columns of the terminal.
    """
    cells = max(width - 2, 8)
    bar_bytes = max(total, device["memory"] if device else 0, 1)
    segments = list(parts)
    if device:
        usable = min(device["usable"], device["memory"])
        free, reserved = max(usable - total, 0), device["memory"] - max(usable, min(total, device["memory"]))
        segments += [(FREE, "", "free", free), (RESERVED, "dim", "not usable", reserved)]
    segments = [segment for segment in segments if segment[3] > 0]
    text = Text("▕", end="")
    for (sign, style, _, _), count in zip(segments, _split(cells, [s[3] / bar_bytes for s in segments]), strict=True):
        text.append(sign * count, style)
    text.append("▏\n")
    if device:
        text.append(_usable_pointer(device["usable"], bar_bytes, cells, width))
    return text


def _usable_pointer(usable: int, bar_bytes: int, cells: int, width: int) -> str:
    """The line under the bar that points to the end of the usable memory."""
    column = min(round(cells * usable / bar_bytes), cells - 1) + 1
    label = f"usable: {format_bytes(usable)}"
    if column + len(label) + 2 <= width:
        return " " * column + f"▲ {label}\n"
    return f"{label} ▲".rjust(column + 1) + "\n"


def letters(names: Sequence[str]) -> list[str]:
    """A letter of its own for each name: its first one that is free, else any."""
    taken: list[str] = []
    for name in names:
        choices = [*name.upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
        taken.append(next((sign for sign in choices if sign.isalnum() and sign not in taken), "?"))
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
    extra_outputs, total = None, None
    if measured["outputs"] is not None:
        extra_outputs = max(measured["outputs"] - measured["aliased"], 0)
        total = measured["arguments"] + measured["temporaries"] + extra_outputs
    figures: list[tuple[str, int | None, int | None]] = [
        ("arrays and batch (arguments)", placed, measured["arguments"]),
        ("while computing (temporaries)", estimated, measured["temporaries"]),
        ("outputs beside the arguments", None, extra_outputs),
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
