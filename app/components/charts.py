"""Line charts and sparklines as SVG, in the theme's colours, with values on hover. Independent of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from ..html import Html, tag
from ..words import number

WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 26
COLOURS = 6


def _no_points() -> np.ndarray:
    return np.zeros(0)


@attrs.frozen
class Line:
    """One series of a chart.

    Attributes:
        name: Its name in the legend.
        x: x coordinates, `[N]`, ascending.
        y: Values, `[N]`.
        colour: Index of its colour.
        dashed: Whether it is drawn dashed.
        dots: Whether its points are drawn as dots.
        missing: x coordinates of NaN or infinite values, `[M]`: the curve has a gap and a mark there.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    dashed: bool = False
    dots: bool = False
    missing: np.ndarray = attrs.Factory(_no_points)


@attrs.frozen
class Mark:
    """A vertical line at an x coordinate, with a description of the event."""

    x: float
    text: str


def chart(
    title: str, lines: Sequence[Line], *, marks: Sequence[Mark] = (), log: bool = False, x_name: str = "step"
) -> Html:
    """Returns a chart with axes, a legend and values on hover (`app.js` reads `data-chart`).

    Non-finite points leave a gap with a mark; non-positive ones are omitted on a logarithmic axis.
    """
    drawn = [_clean(line, log) for line in lines]
    wrong = tag(
        "p", [[line.name, ": ", note, ". "] for line in drawn if (note := _missing_note(line))], cls="small bad"
    )
    wrong = wrong if any(len(line.missing) for line in drawn) else None
    missing = np.concatenate([_no_points(), *(line.missing for line in drawn)])
    drawn = [line for line in drawn if len(line.x)]
    notes = ([f"over {x_name}"] if x_name not in ("step", "token") else []) + (["log"] if log else [])
    heading = tag("h2", title, [tag("span", f" · {note}", cls="muted") for note in notes])
    if not drawn:
        return tag("section", heading, wrong or tag("p", "no values yet", cls="muted"), cls="panel chart")
    x_low = min([line.x[0] for line in drawn] + missing.tolist())
    x_high = max([line.x[-1] for line in drawn] + missing.tolist())
    y_low, y_high = min(line.y.min() for line in drawn), max(line.y.max() for line in drawn)
    x_high = x_high if x_high > x_low else x_low + 1
    y_low, y_high = _roomy(y_low, y_high, log)
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def px(x: np.ndarray) -> np.ndarray:
        return LEFT + (x - x_low) / (x_high - x_low) * across

    def py(y: np.ndarray) -> np.ndarray:
        scaled = (
            (np.log(y) - math.log(y_low)) / (math.log(y_high) - math.log(y_low))
            if log
            else (y - y_low) / (y_high - y_low)
        )
        return TOP + (1 - scaled) * up

    parts: list[Html] = []
    for value in _log_ticks(y_low, y_high) if log else _ticks(y_low, y_high, 4):
        at = float(py(np.asarray(value)))
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}", cls="grid-line"))
        parts.append(tag("text", _tick(value), x=LEFT - 6, y=f"{at + 3.5:.1f}", text_anchor="end"))
    for value in _ticks(x_low, x_high, 5):
        at = float(px(np.asarray(value)))
        parts.append(tag("text", _tick(value), x=f"{at:.1f}", y=HEIGHT - 8, text_anchor="middle"))
    for mark in marks:
        if x_low <= mark.x <= x_high:
            at = f"{float(px(np.asarray(mark.x))):.1f}"
            parts.append(tag("line", tag("title", mark.text), x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM, cls="mark"))
    for at in np.unique(np.round(px(missing))):
        parts.append(tag("text", "×", tag("title", "NaN or infinite"), x=f"{at:.0f}", y=TOP + 10, cls="missing"))
    for line in drawn:
        cls = f"series s{line.colour % COLOURS}{' dashed' if line.dashed else ''}"
        gaps = np.unique(np.searchsorted(line.x, line.missing))
        for xs, ys in zip(np.split(px(line.x), gaps), np.split(py(line.y), gaps), strict=True):
            if len(xs) > 1 or len(line.x) == 1:
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
                parts.append(tag("polyline", points=points, cls=cls))
            elif len(xs) == 1:  # a point between two gaps
                dot = f"dot s{line.colour % COLOURS}"
                parts.append(tag("circle", cx=f"{xs[0]:.1f}", cy=f"{ys[0]:.1f}", r=1.6, cls=dot))
        if line.dots or len(line.x) == 1:
            parts += [
                tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.6, cls=f"dot s{line.colour % COLOURS}")
                for x, y in zip(px(line.x), py(line.y), strict=True)
            ]
    parts.append(tag("line", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, cls="pointer"))
    svg = tag(
        "svg",
        parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=_spoken(title, drawn),
        preserveAspectRatio="none",
    )
    figures = {
        "x": [float(x_low), float(x_high)],
        "plot": [LEFT, WIDTH - RIGHT, WIDTH],
        "xName": x_name,
        "series": [
            {"name": line.name, "x": _short(line.x), "y": _short(line.y), "colour": line.colour % COLOURS}
            for line in drawn
        ],
    }
    legend = [
        tag(
            "span",
            tag("i", cls=f"swatch s{line.colour % COLOURS}{' dashed' if line.dashed else ''}"),
            line.name,
            " ",
            tag("b", number(float(line.y[-1])) if _ends_finite(line) else "not finite"),
        )
        for line in drawn
    ]
    return tag(
        "section",
        heading,
        tag("div", svg, cls="plot", data_chart=figures),
        tag("div", legend, cls="legend"),
        wrong,
        tag("p", "", cls="reading small muted", aria_hidden="true"),
        cls="panel chart",
    )


def sparkline(values: np.ndarray, label: str) -> Html:
    """Returns a line chart without axes, 96 by 24 pixels."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return tag("span", "", cls="muted")
    low, high = float(values.min()), float(values.max())
    span = high - low or 1.0
    x = np.linspace(2, 94, len(values))
    y = 22 - (values - low) / span * 20
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return tag(
        "svg",
        tag("polyline", points=points, cls="series s0"),
        viewBox="0 0 96 24",
        cls="spark",
        role="img",
        aria_label=label,
    )


def _clean(line: Line, log: bool) -> Line:
    valid = np.isfinite(line.y) & ((line.y > 0) if log else True)
    return attrs.evolve(line, x=line.x[valid], y=line.y[valid])


def _roomy(low: float, high: float, log: bool) -> tuple[float, float]:
    low, high = float(low), float(high)
    if log:
        return (low / 1.2, high * 1.2) if high > low else (low / 2, high * 2)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # rounding noise of a constant would be drawn as a curve
        room = abs(high) * 0.1 or 1.0
        return low - room, high + room
    room = (high - low) * 0.06
    return low - room, high + room


def _ticks(low: float, high: float, count: int) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / count))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    every = [power * factor for power in powers for factor in ((1, 2, 5) if len(powers) < 4 else (1,))]
    return [value for value in every if low <= value <= high]


def _ends_finite(line: Line) -> bool:
    return not len(line.missing) or bool(line.missing[-1] < line.x[-1])


def _missing_note(line: Line) -> str:
    if not len(line.missing):
        return ""
    return f"{len(line.missing):,} values are NaN or infinite, the first at {number(float(line.missing[0]))}"


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e4 or abs(value) < 1e-3:
        figures, _, power = f"{value:.2e}".partition("e")
        return f"{value / 1000:g}k" if 1e4 <= abs(value) < 1e6 else f"{float(figures):g}e{int(power)}"
    return f"{value:.4g}"


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") if abs(value) < 1e5 else float(value) for value in values]


def _spoken(title: str, lines: Sequence[Line]) -> str:
    ends = [
        f"{line.name} from {number(float(line.y[0]))} to "
        + (number(float(line.y[-1])) if _ends_finite(line) else "a value that is not finite")
        for line in lines
    ]
    return f"{title}: {'; '.join(ends)}"
