"""Plots the results of a sweep as SVG: the metric against the order of the runs and each changed field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

import attrs

from nnxdsl.config.core.codegen import render
from nnxdsl.config.sweep import Direction
from nnxdsl.sweep.results import Row, differing_paths
from nnxdsl.terminal.display import clean, number

WIDTH, HEIGHT = 340, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 52
PER_ROW = 3
MAX_PANELS = 9
MAX_LABELS = 4
"""Axes with at most this many distinct values have a label for each of them."""
LOG_SPAN = 20.0
"""Axes are logarithmic if the largest value is at least this many times the smallest."""

STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif; }
text { fill: #333; } .name { font-weight: 600; } .frame { fill: none; stroke: #bbb; }
.grid { stroke: #e8e8e8; } .point { fill: #3b6fb6; fill-opacity: .75; } .best { fill: #c2571a; }
.line { fill: none; stroke: #c2571a; }
@media (prefers-color-scheme: dark) {
  svg { background: #16181c; } text { fill: #ccc; } .frame { stroke: #555; } .grid { stroke: #2a2d33; }
  .point { fill: #7fa8e0; } .best { fill: #f0965a; } .line { stroke: #f0965a; }
}
"""


@attrs.frozen
class _Axis:
    """The scale of an axis and its tick labels."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[tuple[float, str], ...]

    def position(self, value: float) -> float:
        low, high, value = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        return 0.5 if high == low else (value - low) / (high - low)


def plot(rows: Sequence[Row], metric: str, direction: Direction, title: str) -> str:
    """The SVG text: a panel for the order of the runs with the best so far, and one for each path that differs."""
    shown = [row for row in rows if row.value is not None and math.isfinite(row.value)]
    shown.sort(key=lambda row: row.point)
    sign = 1 if direction == "minimize" else -1
    best = min(shown, key=lambda row: sign * (row.value or 0.0), default=None)
    panels = [_panel("number of the run", [float(row.point) for row in shown], None, shown, best, sign)]
    for path in differing_paths(rows)[: MAX_PANELS - 1]:
        settings = [row.changes.get(path) for row in shown]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in settings):
            panels.append(
                _panel(
                    path,
                    [float(value) for value in settings if isinstance(value, int | float)],
                    None,
                    shown,
                    best,
                )
            )
        else:
            names = list(dict.fromkeys(render(value) for value in settings))
            panels.append(_panel(path, [float(names.index(render(value))) for value in settings], names, shown, best))
    across = min(PER_ROW, len(panels))
    down = math.ceil(len(panels) / across)
    head = f"{title}: {metric}, {'small' if sign == 1 else 'large'} is good"
    body = "".join(
        f'<g transform="translate({index % across * WIDTH},{index // across * HEIGHT + 26})">{panel}</g>\n'
        for index, panel in enumerate(panels)
    )
    width, height = across * WIDTH, down * HEIGHT + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img">\n<title>{_text(head)}</title>\n<style>{STYLE}</style>\n'
        f'<text class="name" x="{LEFT}" y="20">{_text(head, width // 7)}</text>\n{body}</svg>\n'
    )


def _panel(
    name: str, positions: list[float], names: list[str] | None, rows: list[Row], best: Row | None, sign: int = 0
) -> str:
    values = [row.value or 0.0 for row in rows]
    across = _axis(positions, names)
    up = _axis(values, None, is_linear=True)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{width}" height="{height}"/>']
    for value, text in up.ticks:
        y = TOP + height * (1 - _with_margin(up.position(value)))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_text(text, 9)}</text>')
    for value, text in across.ticks:
        x = LEFT + width * _with_margin(across.position(value))
        max_chars = max(5, 44 // max(1, len(across.ticks)))
        parts.append(f'<text x="{x:.1f}" y="{TOP + height + 17}" text-anchor="middle">{_text(text, max_chars)}</text>')
    middle, under = LEFT + width / 2, TOP + height + 38
    parts.append(f'<text class="name" x="{middle}" y="{under}" text-anchor="middle">{_text(name, 42)}</text>')
    dots: list[tuple[float, float]] = []
    for x_value, value, row in zip(positions, values, rows, strict=True):
        x, y = (
            LEFT + width * _with_margin(across.position(x_value)),
            TOP + height * (1 - _with_margin(up.position(value))),
        )
        dots.append((x, y))
        kind = "best" if row is best else "point"
        label = f"{row.run}: {number(value)}"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{_text(label)}</title></circle>')
    if sign and dots:
        parts.append(f'<path class="line" d="{_best_so_far(dots, values, sign)}"/>')
    return "".join(parts)


def _best_so_far(dots: list[tuple[float, float]], values: list[float], sign: int) -> str:
    path, best = "", 0
    for index, (x, _) in enumerate(dots):
        if sign * values[index] < sign * values[best]:
            path += f"H{x:.1f}"
            best = index
        path += f"{'L' if path else 'M'}{x:.1f},{dots[best][1]:.1f}"
    return path


def _axis(values: list[float], names: list[str] | None, *, is_linear: bool = False) -> _Axis:
    if names is not None:
        return _Axis(-0.5, len(names) - 0.5, False, tuple((float(index), name) for index, name in enumerate(names)))
    low, high = min(values, default=0.0), max(values, default=1.0)
    is_log = not is_linear and low > 0 and high / low >= LOG_SPAN
    if low == high:
        return _Axis(low, high, False, ((low, number(low)),))
    middle = math.sqrt(low * high) if is_log else (low + high) / 2
    distinct = sorted(set(values))
    written = distinct if len(distinct) <= MAX_LABELS and not is_linear else [low, middle, high]
    return _Axis(low, high, is_log, tuple((value, f"{value:.3g}") for value in written))


def _with_margin(share: float) -> float:
    """Leaves a margin of 4 % at both ends of an axis."""
    return 0.04 + 0.92 * share


def _text(text: str, max_length: int = 400) -> str:
    """Escapes text for XML, and shortens it in its middle."""
    text = clean(text).replace("\n", " ")
    if len(text) > max_length:
        text = f"{text[: max_length // 2]}…{text[-(max_length - max_length // 2 - 1) :]}"
    return escape(text)
