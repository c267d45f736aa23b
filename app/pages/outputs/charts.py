"""Histogram and scatter plot as SVG. Independent of runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...html import Html, tag
from ...words import number

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 12, 40
BINS = 21


def histogram(title: str, values: Sequence[float], name: str) -> Html:
    """Returns a histogram; 0 is a bin edge, and bars below it are hatched."""
    if not values:
        return _nothing(title)
    low, high = min(*values, 0.0), max(*values, 0.0)
    width = (high - low) / (BINS - 1) or 1.0
    first = int(np.floor(low / width))
    last = max(first + 1, int(np.ceil(high / width + 1e-9)))
    edges = np.arange(first, last + 1) * width
    counts, _ = np.histogram(values, edges)
    top = max(int(counts.max()), 1)
    across, up = (WIDTH - LEFT - RIGHT) / len(counts), HEIGHT - TOP - BOTTOM
    parts: list[Html] = [
        _text(f"{top:,}", LEFT - 6, TOP + 8, "end"),
        _text("0", LEFT - 6, HEIGHT - BOTTOM + 3, "end"),
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, cls="grid-line"),
    ]
    for place, count in enumerate(counts):
        if not count:
            continue
        tall = up * int(count) / top
        label = f"{number(float(edges[place]))} to {number(float(edges[place + 1]))}: {int(count):,}"
        x, y = LEFT + place * across + 0.5, HEIGHT - BOTTOM - tall
        path = f"M{x:.1f} {y:.1f}h{across - 1:.1f}v{tall:.1f}h{-(across - 1):.1f}z"
        parts.append(tag("path", d=path, cls="bar wrong" if edges[place] < 0 else "bar"))
        parts.append(_hover(label, x, TOP, across, up))
    zero = LEFT - first * across
    parts.append(tag("line", x1=f"{zero:.1f}", x2=f"{zero:.1f}", y1=TOP, y2=HEIGHT - BOTTOM, cls="zero"))
    for place in sorted({0, len(counts), min(max(-first, 0), len(counts))}):
        at = LEFT + place * across
        anchor = "end" if place == len(counts) else "middle"
        parts.append(_text(number(float(f"{edges[place]:.3g}")), at, HEIGHT - BOTTOM + 15, anchor))
    parts.append(_text(name, (LEFT + WIDTH) / 2, HEIGHT - 6, "middle"))
    spoken = f"{title}: {len(values):,} values from {number(min(values))} to {number(max(values))}, "
    spoken += f"{sum(value > 0 for value in values):,} above 0"
    return _figure(title, parts, spoken)


def scatter(
    title: str, groups: Sequence[tuple[str, Sequence[float], Sequence[float]]], x_name: str, y_name: str
) -> Html:
    """Returns a scatter plot of up to two groups, drawn as dots and crosses."""
    every_x = [x for _, xs, _ in groups for x in xs]
    every_y = [y for _, _, ys in groups for y in ys]
    if not every_x:
        return _nothing(title)
    x_low, x_high = min(every_x), max(every_x)
    y_low, y_high = min(*every_y, 0.0), max(*every_y, 0.0)
    x_room, y_room = (x_high - x_low) * 0.04 or 1.0, (y_high - y_low) * 0.06 or 1.0
    x_low, x_high, y_low, y_high = x_low - x_room, x_high + x_room, y_low - y_room, y_high + y_room

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return TOP + (1 - (y - y_low) / (y_high - y_low)) * (HEIGHT - TOP - BOTTOM)

    zero = f"{py(0.0):.1f}"
    parts: list[Html] = [tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=zero, y2=zero, cls="zero")]
    for y in {min(every_y), 0.0, max(every_y)}:
        parts.append(_text(number(float(f"{y:.3g}")), LEFT - 6, py(y) + 3.5, "end"))
    for x in sorted({min(every_x), max(every_x)}):
        parts.append(_text(number(x), px(x), HEIGHT - BOTTOM + 15, "middle"))
    parts.append(_text(f"{x_name} (across), {y_name} (up)", (LEFT + WIDTH) / 2, HEIGHT - 6, "middle"))
    for place, (_, xs, ys) in enumerate(groups):
        for x, y in zip(xs, ys, strict=True):
            a, b = px(x), py(y)
            if place == 0:
                parts.append(tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=2.8, cls="point s0"))
            else:
                cross = f"M{a - 3:.1f} {b - 3:.1f}l6 6m-6 0l6 -6"
                parts.append(tag("path", d=cross, cls="point s1"))
    marks = ("●", "×")
    legend = [
        tag("span", tag("b", marks[place], cls=f"ink s{place}"), f" {name}")
        for place, (name, _, _) in enumerate(groups)
    ]
    return _figure(title, parts, f"{title}: {len(every_x):,} points", tag("div", legend, cls="legend"))


def _text(text: str, x: float, y: float, anchor: str) -> Html:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def _hover(text: str, x: float, y: float, width: float, height: float) -> Html:
    """A transparent path over a bar with its tooltip; the app's `tag` gives `<rect>` no children."""
    path = f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"
    return tag("g", tag("title", text), tag("path", d=path, cls="hover"))


def _figure(title: str, parts: Sequence[Html], spoken: str, below: Html | None = None) -> Html:
    svg = tag("svg", parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=spoken)
    return tag("section", tag("h2", title), tag("div", svg, cls="plot still"), below, cls="panel chart")


def _nothing(title: str) -> Html:
    return tag("section", tag("h2", title), tag("p", "no values", cls="muted"), cls="panel chart")
