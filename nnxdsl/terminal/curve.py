"""A metric over steps as a small SVG drawing for notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from nnxdsl.terminal.display import clean, number

Points = Sequence[tuple[float, float]]
"""Steps and values."""

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 340, 150, 60, 22, 20
MAX_POINTS = 300


def curve(name: str, line: Points, dots: Points = ()) -> str:
    """An SVG element: `line` as a line, `dots` as dots; empty without a finite value."""
    line, dots = _finite(line), _finite(dots)
    points = [*line, *dots]
    if not points:
        return ""
    steps, values = zip(*points, strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    bottom, right = HEIGHT - BOTTOM, WIDTH - 10

    def position(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - first) / ((last - first) or 1)
        up = (point[1] - low) / (high - low) if high > low else 0.5
        return LEFT + across * (right - LEFT), bottom - up * (bottom - TOP)

    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(position, line))
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#c2571a"/>' for x, y in map(position, dots))
    labels = [
        (LEFT, 14, "start", name),
        (LEFT - 5, TOP + 8, "end", number(high)),
        (LEFT - 5, bottom, "end", number(low)),
        (LEFT, HEIGHT - 5, "start", f"step {first:g}"),
        (right, HEIGHT - 5, "end", f"{last:g}"),
    ]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor">'
        f"{html.escape(clean(text))}</text>"
        for x, y, anchor, text in labels
    )
    frame = f'<path d="M{LEFT},{TOP}V{bottom}H{right}" fill="none" stroke="#888"/>'
    polyline = f'<polyline points="{path}" fill="none" stroke="#3b6fb6" stroke-width="1.5"/>'
    return f'<svg role="img" width="{WIDTH}" height="{HEIGHT}">{frame}{polyline}{circles}{texts}</svg>'


def _finite(points: Points) -> Points:
    """The finite ones, evenly thinned out, with the last."""
    finite = [point for point in points if math.isfinite(point[1])]
    every = -(-len(finite) // MAX_POINTS) or 1
    return [*finite[:-1:every], *finite[-1:]]
