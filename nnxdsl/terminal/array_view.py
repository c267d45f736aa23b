"""Draws the sharding of an array as a grid of devices with the block that each holds. Loads no jax."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from rich.console import Console
from rich.text import Text

from nnxdsl.terminal.array_rules_view import show_selected
from nnxdsl.terminal.plan_format import PALETTE, format_axes, mesh_axes, pluralize

ROWS, COLUMNS = 32, 64
"""The largest grid of devices that is drawn."""

_BLOCKS_LISTED = 8

Entry = str | Sequence[str] | None
"""The mesh axes that one dimension is sharded over, the slowest first."""


def blocks(shape: Sequence[int], spec: Sequence[Entry], mesh: Mapping[str, int]) -> np.ndarray:
    """The block of an array's data that each device of a mesh holds.

    Args:
        shape: Global shape.
        spec: The mesh axes of each dimension; dimensions after its end are not sharded.
        mesh: Size of every mesh axis, slowest first.

    Returns:
        int, shaped like the mesh: the number of the block, row-major over the blocks of all dimensions.

    Raises:
        ValueError: `spec` has more entries than `shape`.
    """
    if len(spec) > len(shape):
        raise ValueError(f"{len(spec)} entries of a partition for {len(shape)} dimensions")
    index = np.zeros(tuple(mesh.values()), dtype=int)
    for entry in spec:
        # Row-major over dimensions, and within a dimension over its mesh axes: the same rule for both.
        for axis in mesh_axes(entry):
            index = index * mesh[axis] + _along(axis, mesh)
    return index


def slices_of(mesh: Mapping[str, int], across: Mapping[str, int]) -> np.ndarray:
    """The slice of each device of a mesh, shaped like the mesh.

    Args:
        mesh: Size of every mesh axis, slowest first.
        across: How many slices an axis spans; its fastest steps stay within a slice.
    """
    index = np.zeros(tuple(mesh.values()), dtype=int)
    for axis, size in mesh.items():
        steps = across.get(axis, 1)
        index = index * steps + _along(axis, mesh) // (size // steps)
    return index


def draw(plan: Mapping[str, Any], path: str, console: Console) -> None:
    """Print the grid of devices, each with the number and colour of the block that it holds of one array.

    Arrays with different layouts that match the path are listed; of a grid wider than the console a corner is drawn.

    Raises:
        RunError: No array matches; names the nearest paths.
    """
    mesh = plan["mesh"]
    for array in show_selected(plan, path, console):
        block_of = blocks(array["shape"], array["spec"], mesh)
        slices = slices_of(mesh, plan["across"] if plan["slices"] > 1 else {})
        grid = Grid.choose(mesh, len(str(block_of.max())), console.width, plan["slices"] > 1)
        console.print(Text())
        for line in grid.lines(block_of, slices):
            console.print(line, no_wrap=True, overflow="crop")
        console.print(Text())
        for line in _legend(array, mesh, grid, plan["slices"]):
            console.print(Text(line, overflow="fold"))


@attrs.frozen
class Grid:
    """The devices of a mesh in rows and columns, in the order of their numbers.

    Attributes:
        mesh: Sizes of the axes that are longer than 1, slowest first; never empty.
        columns: Devices in a row: the fastest axes, of which at most one is split over rows and columns.
        cell: Characters of each device.
        rows_shown: Rows that are drawn.
        columns_shown: Columns that are drawn.
    """

    mesh: dict[str, int]
    columns: int
    cell: int
    rows_shown: int
    columns_shown: int

    @property
    def rows(self) -> int:
        """Number of rows, drawn or not."""
        return math.prod(self.mesh.values()) // self.columns

    @classmethod
    def choose(cls, mesh: Mapping[str, int], digits: int, width: int, many_slices: bool) -> Grid:
        """The grid that shows most devices, preferably splits no axis, and is nearest to a square.

        Args:
            mesh: Size of every mesh axis, slowest first.
            digits: Of the largest block number.
            width: Columns of the terminal.
            many_slices: Whether lines between slices are drawn, which takes room.
        """
        axes = {axis: size for axis, size in mesh.items() if size > 1} or {"device": 1}
        grids = [cls._with(axes, columns, digits, width, many_slices) for columns in _row_lengths(axes)]

        def score(grid: Grid) -> tuple[float, ...]:
            shown = grid.rows_shown * grid.columns_shown
            return shown, not grid._split_axis(), -abs(math.log2(grid.columns / grid.rows / 1.5))

        return max(grids, key=score)

    @classmethod
    def _with(cls, axes: dict[str, int], columns: int, digits: int, width: int, many_slices: bool) -> Grid:
        count = math.prod(axes.values())
        rows = min(count // columns, ROWS)
        left, top = cls(axes, columns, 0, 1, 1)._coordinates()
        room = width - sum(max(len(axis), len(str(axes[axis]))) + 2 for axis in left)
        room -= max((len(axis) + 2 for axis in top), default=0) + (len(f" … slice {count}") if many_slices else 2)
        line = int(many_slices)  # a heavy line after each device, at most
        wide, narrow = max(digits + 2, 4), digits + 1
        cell = wide if columns * (wide + line) <= room else narrow
        shown = max(min(columns, room // (cell + line), COLUMNS), 1)
        if shown < columns:  # whole cycles of the fastest axes
            cycle = max(part for part in np.cumprod([1, *reversed(list(axes.values()))]).tolist() if part <= shown)
            shown -= shown % cycle
        return cls(axes, columns, cell, rows, shown)

    def _split_axis(self) -> str | None:
        """The axis that is split over rows and columns."""
        left = self.columns
        for axis, size in reversed(self.mesh.items()):
            if left == 1:
                return None
            if left % size:
                return axis
            left //= size
        return None

    def lines(self, block_of: np.ndarray, slices: np.ndarray) -> Iterator[Text]:
        """The drawing, from the block and the slice of each device: headings, then a line for each row of devices."""
        shown = (slice(self.rows_shown), slice(self.columns_shown))
        block_of, slices = (array.reshape(self.rows, self.columns)[shown] for array in (block_of, slices))
        slice_ends, below = slices[:, 1:] != slices[:, :-1], slices[1:] != slices[:-1]
        heavy = slice_ends.any(axis=0)
        left, top = self._coordinates()
        widths = {axis: max(len(axis), len(str(self.mesh[axis]))) for axis in left}
        names = "".join(f"{axis:<{width + 2}}" for axis, width in widths.items())
        top_width = max((len(axis) + 2 for axis in top), default=0)
        margin = " " * (len(names) + top_width)
        for number, (axis, places) in enumerate(top.items()):
            before = names if number == len(top) - 1 else " " * len(names)
            yield Text(f"{before}{axis:>{top_width - 2}}  ", "bold").append(self._heading(places, heavy), "not bold")
        if names and not top:
            yield Text(names, "bold")
        many = bool(slices.max())
        for row in range(self.rows_shown):
            line = Text("".join(f"{left[axis][row]:<{width + 2}}" for axis, width in widths.items()).ljust(len(margin)))
            for column in range(self.columns_shown):
                block = int(block_of[row, column])
                line.append(f"{block:^{self.cell}}", f"black on {PALETTE[block % len(PALETTE)]}")
                if column < len(heavy) and heavy[column]:
                    line.append("┃" if slice_ends[row, column] else " ")
            if self.columns_shown < self.columns:
                line.append(" …")
            if many and not slice_ends[row].any() and (row == 0 or below[row - 1].any()):
                line.append(f" slice {slices[row, 0]}")
            yield line
            if row < len(below) and below[row].any():
                yield Text(margin + "".join(self._under(below[row], heavy)))
        if self.rows_shown < self.rows:
            yield Text(f"{margin}…")

    def _coordinates(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Coordinates of the rows and of the columns, by axis; of a split axis, `+3` is relative to the row's."""
        left: dict[str, list[str]] = {}
        top: dict[str, list[str]] = {}
        stride = math.prod(self.mesh.values())
        for axis, size in self.mesh.items():
            stride //= size  # devices from one step of the axis to the next
            if stride * size > self.columns:
                left[axis] = [str(row * self.columns // stride % size) for row in range(self.rows_shown)]
            if stride < self.columns and self.columns > 1:
                sign = "+" if axis in left else ""
                top[axis] = [f"{sign}{column // stride % size}" for column in range(self.columns_shown)]
        return left, top

    def _heading(self, places: Sequence[str], heavy: np.ndarray) -> str:
        """Each coordinate above the first column that has it, where there is room."""
        text, free = "", 0
        column = 0
        for index, place in enumerate(places):
            if (index == 0 or place != places[index - 1]) and column >= free:
                text = text.ljust(column) + f"{place:^{self.cell}}".rstrip()
                free = len(text) + 1
            column += self.cell + int(index < len(heavy) and heavy[index])
        return text

    def _under(self, below: np.ndarray, heavy: np.ndarray) -> Iterator[str]:
        for column in range(self.columns_shown):
            yield ("━" if below[column] else " ") * self.cell
            if column < len(heavy) and heavy[column]:
                yield "╋"

    def left_out(self) -> str:
        """A sentence on the devices that are not drawn; empty if all are."""
        shown, total = self.rows_shown * self.columns_shown, self.rows * self.columns
        if shown == total:
            return ""
        parts = [f"{self.rows_shown:,} of {self.rows:,} rows"] if self.rows_shown < self.rows else []
        if self.columns_shown < self.columns:
            parts.append(f"{self.columns_shown:,} of the {self.columns:,} devices of each row")
        return (
            f"drawn: the first {', the first '.join(parts)}; left out: {total - shown:,} of {total:,} devices, "
            "which continue the pattern"
        )


def _row_lengths(axes: Mapping[str, int]) -> Iterator[int]:
    """Possible numbers of devices in a row: the product of the fastest axes, times a divisor of the next."""
    inner = 1
    for size in reversed(list(axes.values())):
        yield from (inner * part for part in range(1, size + 1) if size % part == 0)
        inner *= size


def _legend(array: Mapping[str, Any], mesh: Mapping[str, int], grid: Grid, slices: int) -> Iterator[str]:
    shards = [math.prod(mesh[axis] for axis in mesh_axes(entry)) for entry in array["spec"]]
    count = math.prod(shards)
    yield "each cell is a device, with the number and colour of its block"
    yield f"{pluralize(count, 'block')}, each on {pluralize(array['replicas'], 'device')} (x{array['replicas']})"
    if slices > 1:
        yield f"heavy lines separate the {slices} slices"
    if split := grid._split_axis():
        yield f"{split} is split into rows of {pluralize(grid.columns, 'device')}: +1 is the next device along it"
    if grid.left_out():
        yield grid.left_out()
    for number in range(min(count, _BLOCKS_LISTED) if count > 1 else 0):
        yield f"  block {number}: {_block_slices(number, array, shards)}"
    if count > _BLOCKS_LISTED:
        yield f"  … and {count - _BLOCKS_LISTED:,} more"


def _block_slices(number: int, array: Mapping[str, Any], shards: Sequence[int]) -> str:
    """The slices of the array that a block is: `[:, 288:576, :]`."""
    place = np.unravel_index(number, tuple(shards))
    slices = []
    for index, pieces, size, length in zip(place, shards, array["shape"], array["device_shape"], strict=True):
        begin = int(index) * length
        slices.append(":" if pieces == 1 else f"{min(begin, size)}:{min(begin + length, size)}")
    cut = [
        f"{name or f'dimension {dimension}'} over {format_axes(entry)}"
        for dimension, (name, entry) in enumerate(zip(array["axes"], array["spec"], strict=True))
        if mesh_axes(entry)
    ]
    return f"[{', '.join(slices)}]" + (f"  ({', '.join(cut)})" if number == 0 else "")


def _along(axis: str, mesh: Mapping[str, int]) -> np.ndarray:
    """The coordinate of each device along one axis, to broadcast over the others."""
    return np.arange(mesh[axis]).reshape([-1 if name == axis else 1 for name in mesh])
