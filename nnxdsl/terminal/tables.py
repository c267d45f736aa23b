"""Tables that fit a terminal: columns are folded, then left out by their worth, and what was left out is named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import attrs
from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nnxdsl.terminal.display import clean

GAP = 2
"""Blanks between columns."""


@attrs.frozen
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        cells: From the top.
        rank: Columns of high rank are left out first where the width is short; those of rank 0 never.
        least: The width down to which its cells may be folded; None: they stay whole.
        right: Whether it is set to the right.
        spare: Whether it is left out before any other is folded.
    """

    name: str
    cells: Sequence[str]
    rank: int = 0
    least: int | None = None
    right: bool = False
    spare: bool = False

    @property
    def width(self) -> int:
        """Of its widest cell."""
        return max(map(cell_len, (self.name, *self.cells)))


def show_table(columns: Sequence[Column], console: Console) -> None:
    """Print a table as wide as the console at most; columns that were left out are named under it."""
    fitted = fit(columns, console.width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, width in fitted:
        table.add_column(Text(column.name), justify="right" if column.right else "left", width=width, no_wrap=True)
    cells = [[fold(clean(cell), width) for cell in column.cells] for column, width in fitted]
    for row in zip(*cells, strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    shown = [column for column, _ in fitted]
    gone = [column.name for column in columns if column.name and column not in shown]
    if gone:
        console.print(line(f"left out for want of width: {', '.join(gone)}", "dim"))


def fit(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit, with their widths: folded as far as each allows, then those of highest rank left out."""
    unfolded = sum(column.width + GAP for column in columns) - GAP
    narrowed = [column for column in columns if not column.spare or unfolded <= width]

    def needs(of: Sequence[Column]) -> int:
        least = [min(c.width, max(c.least, len(c.name))) if c.least else c.width for c in of]
        return sum(least) + GAP * (len(of) - 1)

    while needs(narrowed) > width and any(column.rank for column in narrowed):
        narrowed.remove(max(narrowed, key=lambda column: column.rank))
    widths = {column.name: column.width for column in narrowed}
    room = width - GAP * (len(narrowed) - 1)
    # What is too much is taken from the widest that may be folded; at last, from the widest of all.
    for floors in ({c.name: max(c.least or c.width, len(c.name)) for c in narrowed}, {c.name: 1 for c in narrowed}):
        while sum(widths.values()) > room:
            able = [name for name in widths if widths[name] > floors[name]]
            if not able:
                break
            widths[max(able, key=lambda name: widths[name])] -= 1
    return [(column, widths[column.name]) for column in narrowed]


def fold(text: str, width: int) -> str:
    """The text in lines of a width at most: broken at spaces, before the dots of a path, at last anywhere."""
    lines = [""]
    for piece in re.split(r"(?<= )|(?=\.[\w*])|(?<=[+/])", text.replace("\n", " ")):
        if cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        rest = piece
        if cell_len(rest.rstrip()) > width:
            *whole, rest = chop_cells(rest.rstrip(), width)
            lines += [*whole, ""]
        lines[-1] += rest
    return "\n".join(line.rstrip() for line in lines if line.strip()) or ""


def line(text: str, style: str = "") -> Text:
    """One line of words, folded where it is too long."""
    return Text(clean(text), style, overflow="fold")


def gap(console: Console) -> None:
    """An empty line."""
    console.print(Text())


def grid_of(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Names and what is to be said of each, side by side."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), Text(clean(value)))
    return grid
