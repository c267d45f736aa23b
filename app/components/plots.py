"""Plotly figures of metrics: a chart for each metric, of one run or several."""

from __future__ import annotations

import functools
import html
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..store.series import not_finite, thinned

COLOURS = ("#2f6fed", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#087f8b")
"""Readable on light and dark backgrounds."""
ROW_PIXELS, GAP_PIXELS, EDGE_PIXELS = 230, 60, 90
BAR_PIXELS = 26  # below the charts, where app.css puts plotly's buttons
LEGEND_PIXELS, LETTER_PIXELS, MARK_PIXELS = 20, 6.5, 45
"""Of a row of a chart's own legend, one of its letters, and what stands beside a name in it."""
WIDE, NARROW = 560, 280  # pixels across of a chart among others, and of one alone in a row
SHARES = re.compile(r"accurac|frac[ _]|[ _]ratio")  # titles of charts whose values are between 0 and 1
MOST_ROWS = 10  # of a chart's own legend, each of which is a legend of plotly


@attrs.frozen(eq=False)
class Band:
    """The spread about a mean: its edges `[N]`, NaN for fewer than two runs, and what is shown on hover."""

    low: np.ndarray
    high: np.ndarray
    texts: Sequence[str]


@attrs.frozen(eq=False)
class Line:
    """One curve of values `[N]` over ascending x coordinates `[N]`."""

    name: str  # in the legend, where curves of one name are toggled together
    x: np.ndarray
    y: np.ndarray
    colour: int = 0  # its index
    is_dashed: bool = False  # with its points as dots
    is_faint: bool = False  # behind a smoothed curve
    missing: np.ndarray = attrs.field(factory=lambda: np.zeros(0))  # x `[M]` of NaN or infinite values: marked gaps
    band: Band | None = None  # the spread of the runs that it is the mean of
    hover_name: str = ""  # beside the value under the pointer; empty for `name`

    @classmethod
    def of(cls, name: str, x: np.ndarray, values: np.ndarray, **more: Any) -> Line:
        """The curve of a series, thinned out."""
        return cls(name, *thinned(x, values), missing=not_finite(x, values), **more)


@attrs.frozen(eq=False)
class Chart:
    """Curves with a title over one horizontal axis."""

    title: str
    lines: Sequence[Line]
    is_log: bool = False


Mark = tuple[float, str]
"""An x coordinate at which a vertical line stands, and what happened there."""


def figure(
    charts: Sequence[Chart], x_name: str, columns: int, marks: Sequence[Mark] = (), *, own_legends: bool = False
) -> go.Figure:
    """Draws charts, so many beside each other, with marks in each; with legends of their own, or one for all."""
    rows = max(1, -(-len(charts) // columns))
    legends = [_legend_rows(chart, WIDE if columns > 1 else NARROW) if own_legends else [] for chart in charts]
    legend_height = max(map(len, legends), default=0) * LEGEND_PIXELS
    gap = GAP_PIXELS + legend_height
    inner = rows * ROW_PIXELS + (rows - 1) * gap
    subplots = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[_text(chart.title) for chart in charts],
        vertical_spacing=gap / inner,
        horizontal_spacing=0.07,
    )
    named: set[str] = set()
    placed: dict[str, dict[str, object]] = {}
    traces: list[go.Scatter] = []
    for place, chart in enumerate(charts):
        number = str(place + 1) if place else ""
        y_axis, x_axis = subplots.layout[f"yaxis{number}"], subplots.layout[f"xaxis{number}"]
        where = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        legend_of: dict[str, dict[str, str]] = {}
        for row, names in enumerate(reversed(legends[place])):
            name = f"legend{place * MOST_ROWS + row + 1 if place + row else ''}"
            placed[name] = _legend(x_axis.domain[0], y_axis.domain[1] + row * LEGEND_PIXELS / inner)
            legend_of |= {one: {"legend": name} for one in names}
        for line in chart.lines:
            mine = {**where, **legend_of.get(line.name, {})}
            traces += [trace.update(mine) for trace in _traces(line, chart, is_new=line.name not in named)]
            named |= set() if own_legends or line.is_faint else {line.name}
        if marks:
            traces.append(_texts(marks, chart).update(where))
        y_axis.update(type="log" if chart.is_log else "linear", range=_y_range(chart))
        x_axis.update(title={"text": x_name} if place + columns >= len(charts) else None)
    subplots.add_traces(traces)
    subplots.layout.shapes = [
        {"type": "line", "xref": f"x{place + 1 if place else ''}", "yref": f"y{place + 1 if place else ''} domain"}
        | {"x0": x, "x1": x, "y0": 0, "y1": 1, "line": {"width": 1, "dash": "dot", "color": "#888"}}
        for place in range(len(charts))
        for x, _ in marks
    ]
    subplots.update_annotations(font={"size": 13}, yshift=legend_height)
    subplots.update_xaxes(matches="x")
    subplots.layout.xaxis.matches = None  # the one that the others match
    subplots.update_layout(hovermode="x unified")
    styled(subplots, inner + EDGE_PIXELS + BAR_PIXELS + legend_height)
    if own_legends:
        subplots.update_layout(margin={"t": 30 + legend_height}, **placed)
    return subplots


_text = functools.partial(html.escape, quote=False)  # a text in which nothing is markup, of which plotly knows some


def _legend(x: float, y: float) -> dict[str, object]:
    """A legend above the chart whose upper left corner is there."""
    across = {"orientation": "h", "x": x, "xanchor": "left", "y": y, "yanchor": "bottom", "yref": "paper"}
    return {**across, "font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)"}


def _legend_rows(chart: Chart, width: float) -> list[list[str]]:
    """The names of a chart's own legend, in rows: plotly would fill the width of the whole figure."""
    rows: list[list[str]] = [[]]
    across = 0.0
    for name in dict.fromkeys(line.name for line in chart.lines if not line.is_faint):
        pixels = len(name) * LETTER_PIXELS + MARK_PIXELS
        if rows[-1] and across + pixels > width and len(rows) < MOST_ROWS:
            rows.append([])
            across = 0.0
        rows[-1].append(name)
        across += pixels
    return rows


def styled(plot: go.Figure, height: int = 320) -> go.Figure:
    """Gives a figure the looks of all: readable on light and dark backgrounds, the legend above."""
    plot.update_layout(
        height=height,
        margin={"l": 50, "r": 10, "t": 50, "b": BAR_PIXELS + 40},
        legend={"orientation": "h", "y": 1, "yref": "container", "yanchor": "top"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#777", "size": 12},
        uirevision="kept",  # zoom and toggles survive an update
    )
    plot.update_xaxes(gridcolor="rgba(128,128,128,0.2)", zeroline=False)
    plot.update_yaxes(gridcolor="rgba(128,128,128,0.2)", zeroline=False, exponentformat="e")
    return plot


def _y_range(chart: Chart) -> tuple[float, float] | None:
    """0 to 1 for shares; a range about the one value that all curves have, where plotly takes -1 to 1; else None."""
    values = {*_values_of(chart.lines, chart)}
    if SHARES.search(chart.title.lower()) and all(0 <= value <= 1 or math.isnan(value) for value in values):
        return 0.0, 1.02
    if len(values) != 1 or 0.0 in values or chart.is_log:
        return None
    (value,) = values
    return min(0.0, 2 * value), max(0.0, 2 * value)


def _traces(line: Line, chart: Chart, *, is_new: bool) -> Iterator[go.Scatter]:
    """A curve, named in the legend if it is new there; behind it its band, above it the signs of missing values."""
    colour, name = COLOURS[line.colour % len(COLOURS)], _text(line.name)
    group = {"name": name, "legendgroup": name, "showlegend": False}
    texts = None
    gaps, first = np.unique(np.searchsorted(line.x, line.missing), return_index=True)
    if line.band is not None:
        x, y = _polygons(line.x, line.band)
        fill = {"fill": "toself", "fillcolor": f"{colour}30"}  # the last two digits are its opacity
        yield go.Scatter(x=x, y=y, mode="lines", line={"color": colour, "width": 0}, hoverinfo="skip", **fill, **group)
        texts = np.insert(np.array(line.band.texts, dtype=object), gaps, "").tolist()
    reading = f"%{{y:{_format(line.y)}}}{' %{text}' if texts else ''}"
    yield go.Scatter(
        x=np.insert(line.x.astype(float), gaps, line.missing[first]),
        y=np.insert(line.y.astype(float), gaps, np.nan),
        mode="lines+markers" if line.is_dashed or len(line.x) == 1 else "lines",
        marker={"size": 5},
        line={"color": colour, "width": 1 if line.is_faint else 2, "dash": "dash" if line.is_dashed else "solid"},
        opacity=0.35 if line.is_faint else 1,
        hoverinfo="skip" if line.is_faint else None,
        connectgaps=False,
        text=texts,
        hovertemplate=f"{reading}<extra>{_text(line.hover_name) or name}</extra>",
        **{**group, "showlegend": is_new and not line.is_faint},
    )
    if len(line.missing):
        y = np.full(len(line.missing), max(_values_of([line], chart), default=1.0))
        missing = {**group, "name": f"{name}: NaN or infinite"}
        yield go.Scatter(
            x=line.missing, y=y, mode="markers", marker={"symbol": "x", "size": 8, "color": "#c92a2a"}, **missing
        )


def _format(values: np.ndarray) -> str:
    """The notation of values under the pointer: that of `formatting.number`."""
    return ",.0f" if 1000 <= np.max(np.abs(values[np.isfinite(values)]), initial=0.0) < 1e7 else ".4~g"


def _polygons(x: np.ndarray, band: Band) -> tuple[np.ndarray, np.ndarray]:
    """The outline of a band, one polygon for each stretch without gaps, with NaN between them."""
    places = np.flatnonzero(np.isfinite(band.low) & np.isfinite(band.high))
    xs, ys = [np.zeros(0)], [np.zeros(0)]
    for span in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else ():
        xs += [x[span], x[span][::-1], np.full(1, np.nan)]
        ys += [band.high[span], band.low[span][::-1], np.full(1, np.nan)]
    return np.concatenate(xs)[:-1], np.concatenate(ys)[:-1]


def _texts(marks: Sequence[Mark], chart: Chart) -> go.Scatter:
    return go.Scatter(
        x=[x for x, _ in marks],
        y=[min(_values_of(chart.lines, chart), default=1.0)] * len(marks),
        text=[text for _, text in marks],
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        mode="markers",
        marker={"symbol": "triangle-up", "size": 7, "color": "#888"},
    )


def _values_of(lines: Sequence[Line], chart: Chart) -> list[float]:
    """The values of curves that the axis of their chart has."""
    values = np.concatenate([np.zeros(0), *(line.y for line in lines)])
    return values[(values > 0) | (not chart.is_log)].tolist()
