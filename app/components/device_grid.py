"""The devices of a mesh as a grid: which block of one array each of them holds. From plain values, without jax."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from nnxdsl.terminal.array_view import blocks
from nnxdsl.terminal.plan_format import PALETTE, format_axes, format_shape, mesh_axes, pluralize

from ..formatting import size
from ..markup import Html, join, tag

MOST = 256  # maximum number of devices that are drawn
WIDEST = 16  # devices per row if one axis has more


@attrs.frozen
class Cell:
    """A device by its number, with its index along each axis with size > 1.

    It holds a block, by number, which has a start and a stop in every dimension. Numbers are row-major.
    """

    number: int
    place: dict[str, int]
    block: int
    held: tuple[tuple[int, int], ...]


def cells(array: Mapping[str, Any], mesh: Mapping[str, int], shown: Mapping[str, int]) -> Iterator[Cell]:
    """Yields devices of a mesh by ascending number, `shown` indices of each axis (or 1), for an array of a plan."""
    part = tuple(slice(shown.get(axis, 1)) for axis in mesh)
    numbers = np.arange(math.prod(mesh.values())).reshape(*mesh.values())[part]
    cuts = [math.prod(mesh[axis] for axis in mesh_axes(entry)) for entry in array["spec"]]
    cuts += [1] * (len(array["shape"]) - len(cuts))
    for place, block in np.ndenumerate(blocks(array["shape"], array["spec"], mesh)[part]):
        where = {axis: index for axis, index in zip(mesh, place, strict=True) if mesh[axis] > 1}
        held = [
            (min(index * length, whole), min((index + 1) * length, whole))
            for index, length, whole in zip(
                map(int, np.unravel_index(block, cuts)), array["device_shape"], array["shape"], strict=True
            )
        ]
        yield Cell(int(numbers[place]), where, int(block), tuple(held))


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


def drawing(array: Mapping[str, Any], mesh: Mapping[str, int]) -> Html:
    """Returns the grid of devices with what its blocks are; texts of the array are escaped."""
    shown = chosen(array, mesh)
    shown_cells = list(cells(array, mesh, shown))
    devices = math.prod(mesh.values())
    blocks = devices // max(1, array["replicas"])
    split = [
        f"{name or f'dimension {number}'} over {format_axes(entry)}"
        for number, (name, entry) in enumerate(zip(array["axes"], array["spec"], strict=True))
        if mesh_axes(entry)
    ]
    about = (
        f"{pluralize(blocks, 'block')}, each on {pluralize(array['replicas'], 'device')}; a block is "
        f"{format_shape(array['device_shape'])}, {size(array['device_bytes'])}; "
        f"{', '.join(split) if blocks > 1 else 'replicated on every device'}."
    )
    label = f"{len(shown_cells)} devices and their blocks; use the arrow keys to move between them"
    count, note = len(shown_cells), None
    if count < devices:
        rest = f"{devices - count:,} of {devices:,} devices are not drawn"
        note = f"A corner of one replica group is drawn; {rest} and continue the pattern."
        if count == blocks:
            note = f"One replica group is drawn; {rest} and hold copies of the same blocks."
    return join(
        tag("p", tag("b", f"×{array['replicas']} "), about),
        tag("div", _panels(shown_cells, array, shown), cls="devices", role="group", aria_label=label),
        tag("p", "Point at a device, or focus it, to see its block.", cls="reading-cell"),
        None if note is None else tag("p", note),
    )


def _panels(shown_cells: list[Cell], array: Mapping[str, Any], shown: Mapping[str, int]) -> list[Html]:
    """Returns one grid per index of the leading axes; the last axis runs across, the one before it down."""
    axes = [axis for axis, count in shown.items() if count > 1]
    across = axes[-1] if axes else ""
    down = axes[-2] if len(axes) > 1 else ""
    columns = shown.get(across, 1)
    width = columns if columns <= 2 * WIDEST else math.gcd(columns, WIDEST) if columns % WIDEST == 0 else WIDEST
    one = columns * shown.get(down, 1)
    panels: list[Html] = []
    for begin in range(0, len(shown_cells), one):
        part = shown_cells[begin : begin + one]
        others = ", ".join(f"{axis} {part[0].place[axis]}" for axis in axes[:-2])
        arrows = [f"{across} →" if across else "", f"{down} ↓" if down else ""]
        caption = " · ".join(filter(None, (others, " ".join(filter(None, arrows)))))
        grid = [_cell(cell, array, first=begin == 0 and number == 0) for number, cell in enumerate(part)]
        cells_shown = tag("div", grid, cls="device-grid", style=f"--columns:{width}", data_columns=width)
        panels.append(tag("figure", tag("figcaption", caption or "one device"), cells_shown))
    return panels


def _cell(cell: Cell, array: Mapping[str, Any], first: bool) -> Html:
    place = ", ".join(f"{axis} {index}" for axis, index in cell.place.items())
    parts = zip(cell.held, array["shape"], strict=True)
    held = ", ".join(":" if part == (0, length) else f"{part[0]}:{part[1]}" for part, length in parts)
    label = f"device {cell.number}{f' ({place})' if place else ''}: block {cell.block}, [{held}]"
    style, index = f"background:{PALETTE[cell.block % len(PALETTE)]}", 0 if first else -1
    names = {"cls": "device", "data_block": cell.block, "title": label, "aria_label": label}
    return tag("button", cell.block, type="button", style=style, tabindex=index, **names)
