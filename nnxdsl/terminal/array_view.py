"""The picture of one array on a grid of devices: which block of its data each holds; knows plain values, no jax."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from rich.console import Console
from rich.text import Text

from nnxdsl.terminal.plan_view import PALETTE, counted, entry_words, shown

ROWS, COLUMNS = 32, 64
"""The most cells of devices that are drawn."""

_BLOCKS_LISTED = 8

Entry = str | Sequence[str] | None
"""The mesh axes that one dimension is cut over, the slowest first."""


def blocks(shape: Sequence[int], spec: Sequence[Entry], mesh: Mapping[str, int]) -> np.ndarray:
    """The block of an array's data that each device of a mesh holds.

    Args:
        shape: Of the whole array.
        spec: The mesh axes of each dimension; dimensions after its end are whole.
        mesh: Size of every mesh axis, slowest first.

    Returns:
        Shaped like the mesh, of int: the number of the block, row-major over the blocks of all dimensions.

    Raises:
        ValueError: `spec` has more entries than `shape`.
    """
    if len(spec) > len(shape):
        raise ValueError(f"{len(spec)} entries of a partition for {len(shape)} dimensions")
    index = np.zeros(tuple(mesh.values()), dtype=int)
    for entry in spec:
        # Row-major over dimensions, and within a dimension over its mesh axes: the same rule for both.
        for axis in _axes(entry):
            index = index * mesh[axis] + _along(axis, mesh)
    return index


def slices_of(mesh: Mapping[str, int], across: Mapping[str, int]) -> np.ndarray:
    """The slice that each device of a mesh is of, shaped like the mesh.

    Args:
        mesh: Size of every mesh axis, slowest first.
        across: How many steps of an axis lie between slices; within a slice it steps first.
    """
    index = np.zeros(tuple(mesh.values()), dtype=int)
    for axis, size in mesh.items():
        steps = across.get(axis, 1)
        index = index * steps + _along(axis, mesh) // (size // steps)
    return index


def draw(found: Mapping[str, Any], path: str, console: Console) -> None:
    """Print the grid of devices, each with the number and colour of the block that it holds of one array.

    Args:
        found: The plan, as `nnxdsl plan --json` prints it.
        path: Of the array; see `nnxdsl.terminal.plan_view.select`. Several that differ are listed.
        console: Where to; of more devices than it takes, a corner is drawn.

    Raises:
        RunError: there is no such array; with the nearest paths.
    """
    for kind in shown(found, path, console):
        array, mesh = kind[0], found["mesh"]
        held = blocks(array["shape"], array["spec"], mesh)
        slices = slices_of(mesh, found["across"] if found["slices"] > 1 else {})
        grid = Grid.choose(mesh, len(str(held.max())), console.width, found["slices"] > 1)
        console.print(Text())
        for line in grid.lines(held, slices):
            console.print(line, no_wrap=True, overflow="crop")
        console.print(Text())
        for line in _legend(array, mesh, grid, found["slices"]):
            console.print(Text(line, overflow="fold"))


@attrs.frozen
class Grid:
    """How the devices of a mesh stand in rows and columns, in the order of their numbers.

    Attributes:
        mesh: Sizes of the axes that are longer than 1, slowest first; never empty.
        columns: Devices in a row; the fastest axes run along it, at most one of them only in part.
        cell: Characters of a device.
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
        """All of them."""
        return math.prod(self.mesh.values()) // self.columns

    @classmethod
    def choose(cls, mesh: Mapping[str, int], digits: int, width: int, many_slices: bool) -> Grid:
        """The grid that shows most devices, breaks no axis if it can be helped, and is the nearest to a square.

        Args:
            mesh: Size of every mesh axis, slowest first.
            digits: Of the greatest number of a block.
            width: Columns of the terminal.
            many_slices: Whether they must be told apart, which takes room.
        """
        axes = {axis: size for axis, size in mesh.items() if size > 1} or {"device": 1}
        grids = [cls._with(axes, columns, digits, width, many_slices) for columns in _row_lengths(axes)]

        def worth(grid: Grid) -> tuple[float, ...]:
            shown = grid.rows_shown * grid.columns_shown
            return shown, not grid._broken(), -abs(math.log2(grid.columns / grid.rows / 1.5))

        return max(grids, key=worth)

    @classmethod
    def _with(cls, axes: dict[str, int], columns: int, digits: int, width: int, many_slices: bool) -> Grid:
        count = math.prod(axes.values())
        rows = min(count // columns, ROWS)
        left, top = cls(axes, columns, 0, 1, 1)._coordinates()
        room = width - sum(max(len(axis), len(str(axes[axis]))) + 2 for axis in left)
        room -= max((len(axis) + 2 for axis in top), default=0) + (len(f" … slice {count}") if many_slices else 2)
        line = int(many_slices)  # a heavy one after each device, at most
        wide, narrow = max(digits + 2, 4), digits + 1
        cell = wide if columns * (wide + line) <= room else narrow
        shown = max(min(columns, room // (cell + line), COLUMNS), 1)
        if shown < columns:  # whole turns of the fastest axes
            turn = max(part for part in np.cumprod([1, *reversed(list(axes.values()))]).tolist() if part <= shown)
            shown -= shown % turn
        return cls(axes, columns, cell, rows, shown)

    def _broken(self) -> str | None:
        """The axis that runs along both the rows and the columns."""
        left = self.columns
        for axis, size in reversed(self.mesh.items()):
            if left == 1:
                return None
            if left % size:
                return axis
            left //= size
        return None

    def lines(self, held: np.ndarray, slices: np.ndarray) -> Iterator[Text]:
        """The drawing: headings, then a line for each row of devices.

        Args:
            held: The block of each device.
            slices: The slice of each device.
        """
        shown = (slice(self.rows_shown), slice(self.columns_shown))
        held, slices = (array.reshape(self.rows, self.columns)[shown] for array in (held, slices))
        beside, below = slices[:, 1:] != slices[:, :-1], slices[1:] != slices[:-1]
        heavy = beside.any(axis=0)
        left, top = self._coordinates()
        widths = {axis: max(len(axis), len(str(self.mesh[axis]))) for axis in left}
        names = "".join(f"{axis:<{width + 2}}" for axis, width in widths.items())
        beyond = max((len(axis) + 2 for axis in top), default=0)
        margin = " " * (len(names) + beyond)
        for number, (axis, places) in enumerate(top.items()):
            before = names if number == len(top) - 1 else " " * len(names)
            yield Text(f"{before}{axis:>{beyond - 2}}  ", "bold").append(self._heading(places, heavy), "not bold")
        if names and not top:
            yield Text(names, "bold")
        many = bool(slices.max())
        for row in range(self.rows_shown):
            line = Text("".join(f"{left[axis][row]:<{width + 2}}" for axis, width in widths.items()).ljust(len(margin)))
            for column in range(self.columns_shown):
                block = int(held[row, column])
                line.append(f"{block:^{self.cell}}", f"black on {PALETTE[block % len(PALETTE)]}")
                if column < len(heavy) and heavy[column]:
                    line.append("┃" if beside[row, column] else " ")
            if self.columns_shown < self.columns:
                line.append(" …")
            if many and not beside[row].any() and (row == 0 or below[row - 1].any()):
                line.append(f" slice {slices[row, 0]}")
            yield line
            if row < len(below) and below[row].any():
                yield Text(margin + "".join(self._under(below[row], heavy)))
        if self.rows_shown < self.rows:
            yield Text(f"{margin}…")

    def _coordinates(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """The places along each axis of the rows, and of the columns; of a broken axis, `+3` beyond the row's."""
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
        """Each place over the first of the columns that have it, where it has room."""
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
        """What is not drawn, in words; empty where all is."""
        shown, whole = self.rows_shown * self.columns_shown, self.rows * self.columns
        if shown == whole:
            return ""
        parts = [f"{self.rows_shown:,} of {self.rows:,} rows"] if self.rows_shown < self.rows else []
        if self.columns_shown < self.columns:
            parts.append(f"{self.columns_shown:,} of the {self.columns:,} devices of each row")
        return (
            f"drawn: the first {', the first '.join(parts)}; left out: {whole - shown:,} of {whole:,} devices, "
            "which go on in the same way"
        )


def _row_lengths(axes: Mapping[str, int]) -> Iterator[int]:
    """Every number of devices that may stand in a row: the fastest axes, and a divisor of the next."""
    inner = 1
    for size in reversed(list(axes.values())):
        yield from (inner * part for part in range(1, size + 1) if size % part == 0)
        inner *= size


def _legend(array: Mapping[str, Any], mesh: Mapping[str, int], grid: Grid, slices: int) -> Iterator[str]:
    shards = [math.prod(mesh[axis] for axis in _axes(entry)) for entry in array["spec"]]
    count = math.prod(shards)
    yield "a cell is a device, its number and colour the block that it holds"
    yield f"{counted(count, 'block')}, each on {counted(array['replicas'], 'device')} (x{array['replicas']})"
    if slices > 1:
        yield f"heavy lines lie between the {slices} slices"
    if broken := grid._broken():
        yield f"{broken} is broken into rows of {counted(grid.columns, 'device')}: +1 is one further along it"
    if grid.left_out():
        yield grid.left_out()
    for number in range(min(count, _BLOCKS_LISTED) if count > 1 else 0):
        yield f"  block {number}: {_block_words(number, array, shards)}"
    if count > _BLOCKS_LISTED:
        yield f"  … and {count - _BLOCKS_LISTED:,} more"


def _block_words(number: int, array: Mapping[str, Any], shards: Sequence[int]) -> str:
    """What a block holds: `[:, 288:576, :]`."""
    place = np.unravel_index(number, tuple(shards))
    words = []
    for index, pieces, whole, length in zip(place, shards, array["shape"], array["device_shape"], strict=True):
        begin = int(index) * length
        words.append(":" if pieces == 1 else f"{min(begin, whole)}:{min(begin + length, whole)}")
    cut = [
        f"{name or f'dimension {dimension}'} over {entry_words(entry)}"
        for dimension, (name, entry) in enumerate(zip(array["axes"], array["spec"], strict=True))
        if _axes(entry)
    ]
    return f"[{', '.join(words)}]" + (f"  ({', '.join(cut)})" if number == 0 else "")


def _axes(entry: Entry) -> Sequence[str]:
    return [entry] if isinstance(entry, str) else entry or []


def _along(axis: str, mesh: Mapping[str, int]) -> np.ndarray:
    """The place of each device along one axis, to be broadcast over the others."""
    return np.arange(mesh[axis]).reshape([-1 if name == axis else 1 for name in mesh])
