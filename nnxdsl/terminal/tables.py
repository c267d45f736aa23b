"""Tables that fit a terminal: columns are folded, then left out by their rank, and those left out are named."""

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
        name: Heading.
        cells: From top to bottom.
        rank: Where the width is short, columns of high rank are left out first; those of rank 0 never.
        least: The width down to which cells may be folded; None: not at all.
        right: Whether to align right.
        spare: Whether to leave it out before any other column is folded.
    """

    name: str
    cells: Sequence[str]
    rank: int = 0
    least: int | None = None
    right: bool = False
    spare: bool = False

    @property
    def width(self) -> int:
        """Width of the widest cell, in terminal columns."""
        return max(map(cell_len, (self.name, *self.cells)))


def show_section(title: str, columns: Sequence[Column], console: Console) -> None:
    """Print an empty line, a title in bold and a table."""
    gap(console)
    console.print(line(title, "bold"))
    show_table(columns, console)


def show_table(columns: Sequence[Column], console: Console) -> None:
    """Print a table no wider than the console, and the names of the columns that were left out."""
    fitted = fit(columns, console.width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, width in fitted:
        table.add_column(Text(column.name), justify="right" if column.right else "left", width=width, no_wrap=True)
    cells = [[fold(clean(cell), width) for cell in column.cells] for column, width in fitted]
    for row in zip(*cells, strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    shown = [column for column, _ in fitted]
    left_out = [column.name for column in columns if column.name and column not in shown]
    if left_out:
        console.print(line(f"left out (terminal too narrow): {', '.join(left_out)}", "dim"))


def fit(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit, with their widths: folded as far as each allows, then those of highest rank left out."""
    unfolded = sum(column.width + GAP for column in columns) - GAP
    chosen = [column for column in columns if not column.spare or unfolded <= width]

    def least_width() -> int:
        least = [min(c.width, max(c.least, len(c.name))) if c.least else c.width for c in chosen]
        return sum(least) + GAP * (len(chosen) - 1)

    while least_width() > width and any(column.rank for column in chosen):
        chosen.remove(max(chosen, key=lambda column: column.rank))
    widths = {column.name: column.width for column in chosen}
    room = width - GAP * (len(chosen) - 1)
    # Narrow the widest column that may be folded; if none may, the widest of all.
    for floors in ({c.name: max(c.least or c.width, len(c.name)) for c in chosen}, {c.name: 1 for c in chosen}):
        while sum(widths.values()) > room:
            foldable = [name for name in widths if widths[name] > floors[name]]
            if not foldable:
                break
            widths[max(foldable, key=lambda name: widths[name])] -= 1
    return [(column, widths[column.name]) for column in chosen]


def fold(text: str, width: int) -> str:
    """The text in lines of at most `width`: broken at spaces, else before the dots of a path, else anywhere."""
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
    """One line of text, folded where it is too long."""
    return Text(clean(text), style, overflow="fold")


def gap(console: Console) -> None:
    """Print an empty line."""
    console.print(Text())


def grid_of(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Names and values side by side; `style` is that of the names."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style=style)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), Text(clean(value)))
    return grid
