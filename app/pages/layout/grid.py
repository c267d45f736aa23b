"""Draws the sharding of one array over the devices of a mesh, from plain values, without jax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from nnxdsl.terminal.plan_format import PALETTE, format_axes, format_shape, mesh_axes, pluralize

from ...html import Html, join, tag
from ...words import size

MOST = 256
"""Maximum number of devices that are drawn."""

WIDEST = 16
"""Devices per row if one axis has more."""

Entry = str | Sequence[str] | None


@attrs.frozen
class Cell:
    """One device of the drawing.

    Attributes:
        number: Device number, row-major over the mesh.
        place: Its index along each axis with size > 1.
        block: Number of its block, row-major over the blocks of all dimensions.
        held: Start and stop of its slice of every dimension.
    """

    number: int
    place: dict[str, int]
    block: int
    held: tuple[tuple[int, int], ...]


def cells(array: Mapping[str, Any], mesh: Mapping[str, int], shown: Mapping[str, int]) -> Iterator[Cell]:
    """Yields the devices of a part of a mesh, by ascending number.

    Args:
        array: An array of `nnxdsl plan --json`.
        mesh: Size of every mesh axis, slowest-varying first.
        shown: Number of indices to include per axis; 1 for axes that are not named.
    """
    axes = [axis for axis, count in mesh.items() if count > 1]
    for places in itertools.product(*(range(shown.get(axis, 1)) for axis in axes)):
        place = dict(zip(axes, places, strict=True))
        number = 0
        for axis, count in mesh.items():
            number = number * count + place.get(axis, 0)
        block, slices = 0, []
        for dimension, whole in enumerate(array["shape"]):
            entry = array["spec"][dimension] if dimension < len(array["spec"]) else None
            index = 0
            for axis in mesh_axes(entry):
                index = index * mesh[axis] + place.get(axis, 0)
                block = block * mesh[axis] + place.get(axis, 0)
            length = array["device_shape"][dimension]
            slices.append((min(index * length, whole), min((index + 1) * length, whole)))
        yield Cell(number, place, block, tuple(slices))


def chosen(array: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, int]:
    """Number of indices to draw per axis: all, or one replica group of a large mesh, or a corner of that."""
    axes = {axis: count for axis, count in mesh.items() if count > 1}
    if math.prod(axes.values()) <= MOST:
        return axes
    cut = {axis for entry in array["spec"] for axis in mesh_axes(entry)}
    shown = {axis: count if axis in cut else 1 for axis, count in axes.items()}
    for axis in shown:  # slowest-varying first
        rest = math.prod(shown.values()) // shown[axis]
        if rest * shown[axis] > MOST:
            shown[axis] = max(1, MOST // rest)
    return shown


def held_words(cell: Cell, array: Mapping[str, Any]) -> str:
    """Formats a device's slices, such as `[:, 64:128, 0:64]`."""
    whole = [(0, length) for length in array["shape"]]
    words = [":" if part == all_ else f"{part[0]}:{part[1]}" for part, all_ in zip(cell.held, whole, strict=True)]
    return f"[{', '.join(words)}]"


def drawing(array: Mapping[str, Any], found: Mapping[str, Any]) -> Html:
    """Returns the grid of devices with a legend; hovering or focusing a device shows its slices (`layout.js`).

    Args:
        array: One of the plan's arrays.
        found: The plan.
    """
    mesh: Mapping[str, int] = found["mesh"]
    shown = chosen(array, mesh)
    drawn = list(cells(array, mesh, shown))
    devices = math.prod(mesh.values())
    blocks = devices // max(1, array["replicas"])
    pieces = [
        tag("span", f"{name or f'dimension {number}'} over {format_axes(entry)}", cls="chip")
        for number, (name, entry) in enumerate(zip(array["axes"], array["spec"], strict=True))
        if mesh_axes(entry)
    ]
    whole = tag("span", "replicated on every device", cls="chip") if blocks == 1 else None
    about = tag(
        "p",
        tag("span", f"×{array['replicas']}", cls="replicas", title=f"each block is on {array['replicas']} devices"),
        f" {pluralize(blocks, 'block')}, each on {pluralize(array['replicas'], 'device')}; a block is "
        f"{format_shape(array['device_shape'])}, {size(array['device_bytes'])} ",
        pieces or whole,
    )
    left_out = None
    if len(drawn) < devices:
        rest = f"{devices - len(drawn):,} of {devices:,} devices are not drawn"
        is_group = len(drawn) == blocks
        words = (
            f"One replica group is drawn; {rest} and hold copies of the same blocks."
            if is_group
            else (f"A corner of one replica group is drawn; {rest} and continue the pattern.")
        )
        left_out = tag("p", words, cls="muted small")
    return join(
        about,
        tag(
            "div",
            _panels(drawn, array, shown),
            cls="devices",
            role="group",
            aria_label=f"{len(drawn)} devices and their blocks; use the arrow keys to move between them",
        ),
        tag(
            "p",
            "Hover or focus a device to see its block.",
            cls="reading-cell small muted",
        ),
        left_out,
    )


def _panels(drawn: list[Cell], array: Mapping[str, Any], shown: Mapping[str, int]) -> list[Html]:
    """Returns one grid per index of the leading axes; the last axis runs across, the one before it down."""
    axes = [axis for axis, count in shown.items() if count > 1]
    across = axes[-1] if axes else ""
    down = axes[-2] if len(axes) > 1 else ""
    columns = shown.get(across, 1)
    width = columns if columns <= 2 * WIDEST else math.gcd(columns, WIDEST) if columns % WIDEST == 0 else WIDEST
    one = columns * shown.get(down, 1)
    panels: list[Html] = []
    for begin in range(0, len(drawn), one):
        part = drawn[begin : begin + one]
        others = ", ".join(f"{axis} {part[0].place[axis]}" for axis in axes[:-2])
        arrows = [f"{across} →" if across else "", f"{down} ↓" if down else ""]
        caption = " · ".join(filter(None, (others, " ".join(filter(None, arrows)))))
        grid = [_cell(cell, array, first=begin == 0 and number == 0) for number, cell in enumerate(part)]
        panels.append(
            tag(
                "figure",
                tag("figcaption", caption or "one device"),
                tag("div", grid, cls="device-grid", style=f"--columns:{width}", data_columns=width),
            )
        )
    return panels


def _cell(cell: Cell, array: Mapping[str, Any], first: bool) -> Html:
    place = ", ".join(f"{axis} {index}" for axis, index in cell.place.items())
    words = f"device {cell.number}{f' ({place})' if place else ''}: block {cell.block}, {held_words(cell, array)}"
    return tag(
        "button",
        cell.block,
        type="button",
        cls="device",
        style=f"background:{PALETTE[cell.block % len(PALETTE)]}",
        data_block=cell.block,
        tabindex=0 if first else -1,
        title=words,
        aria_label=words,
    )
