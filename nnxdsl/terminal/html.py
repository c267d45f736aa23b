"""HTML of results and plans for notebooks; every text is escaped."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console

from nnxdsl.terminal.display import clean, number

WIDTH = 140
"""Width of the recorded terminal, in columns."""


def text(value: object) -> str:
    """A value as HTML text: a float with four digits, None as nothing."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return html.escape(number(value))
    return "" if value is None else html.escape(clean(str(value)))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, title: str = "") -> str:
    """A table under a title."""
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<b>{text(title)}</b><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def render_html(draw: Callable[[Console], object]) -> str:
    """The terminal output of `draw` as HTML, with its colours, in a `<pre>`."""
    style = "overflow-x:auto;white-space:pre;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',consolas,monospace"
    return _record(draw).export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')


def render_text(draw: Callable[[Console], object]) -> str:
    """The terminal output of `draw` as plain text."""
    return _record(draw).export_text()


def _record(draw: Callable[[Console], object]) -> Console:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_jupyter=False)
    draw(console)
    return console
