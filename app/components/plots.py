"""Plotly figures of metrics: a chart for each metric, of one run or several. Independent of runs."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

COLOURS = ("#2f6fed", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#087f8b")
"""Readable on light and dark backgrounds."""
ROW_PIXELS, GAP_PIXELS, EDGE_PIXELS = 230, 60, 90


def _no_points() -> np.ndarray:
    return np.zeros(0)


@attrs.frozen(eq=False)
class Line:
    """One curve.

    Attributes:
        name: Its name in the legend, where curves of one name are toggled together.
        x: x coordinates, `[N]`, ascending.
        y: Values, `[N]`.
        colour: Index of its colour.
        is_dashed: Whether it is dashed, with its points as dots.
        is_faint: Whether it stands behind a smoothed curve.
        missing: x coordinates of NaN or infinite values, `[M]`, which leave a gap and are marked.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    is_dashed: bool = False
    is_faint: bool = False
    missing: np.ndarray = attrs.field(factory=_no_points)


@attrs.frozen(eq=False)
class Chart:
    """Curves with a title over one horizontal axis."""

    title: str
    lines: Sequence[Line]
    is_log: bool = False


@attrs.frozen
class Mark:
    """A vertical line at an x coordinate, with what happened there."""

    x: float
    text: str


def figure(charts: Sequence[Chart], x_name: str, columns: int, marks: Sequence[Mark] = ()) -> go.Figure:
    """Draws charts in a grid, with one legend.

    Args:
        charts: The charts, row by row.
        x_name: What the horizontal axes are.
        columns: Number of charts beside each other.
        marks: Vertical lines in every chart.
    """
    rows = max(1, -(-len(charts) // columns))
    height = rows * ROW_PIXELS + (rows - 1) * GAP_PIXELS + EDGE_PIXELS
    drawn = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[chart.title for chart in charts],
        vertical_spacing=GAP_PIXELS / (height - EDGE_PIXELS),
        horizontal_spacing=0.07,
    )
    named: set[str] = set()
    for place, chart in enumerate(charts):
        where = {"row": place // columns + 1, "col": place % columns + 1}
        for line in chart.lines:
            drawn.add_trace(_curve(line, show=line.name not in named), **where)
            named.add(line.name)
            if len(line.missing):
                drawn.add_trace(_missing(line, chart), **where)
        for mark in marks:
            drawn.add_vline(mark.x, line={"width": 1, "dash": "dot", "color": "#888"}, **where)
        drawn.update_yaxes(type="log" if chart.is_log else "linear", range=_range_of_constant(chart), **where)
        drawn.update_xaxes(title_text=x_name if place + columns >= len(charts) else None, **where)
    drawn.update_annotations(font={"size": 13})
    drawn.update_xaxes(matches="x")
    drawn.layout.xaxis.matches = None  # the one that the others match
    drawn.update_layout(hovermode="x unified")
    return styled(drawn, height)


def styled(drawn: go.Figure, height: int = 320) -> go.Figure:
    """Gives a figure the looks of all: readable on light and dark backgrounds, the legend above."""
    drawn.update_layout(
        height=height,
        margin={"l": 50, "r": 10, "t": 50, "b": 40},
        legend={"orientation": "h", "y": 1, "yref": "container", "yanchor": "top"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#777", "size": 12},
        uirevision="kept",  # zoom and toggles survive an update
    )
    drawn.update_xaxes(gridcolor="rgba(128,128,128,0.2)", zeroline=False)
    drawn.update_yaxes(gridcolor="rgba(128,128,128,0.2)", zeroline=False)
    return drawn


def _range_of_constant(chart: Chart) -> tuple[float, float] | None:
    """A range about the one value that all curves have; plotly takes -1 to 1. None if they have several."""
    values = np.unique(np.concatenate([line.y for line in chart.lines] or [np.zeros(0)]))
    if len(values) != 1 or not values[0] or chart.is_log:
        return None
    return tuple(sorted((0.0, 2 * float(values[0]))))


def _curve(line: Line, *, show: bool) -> go.Scatter:
    gaps, first = np.unique(np.searchsorted(line.x, line.missing), return_index=True)
    colour = COLOURS[line.colour % len(COLOURS)]
    return go.Scatter(
        x=np.insert(line.x.astype(float), gaps, line.missing[first]),
        y=np.insert(line.y.astype(float), gaps, np.nan),
        name=line.name,
        legendgroup=line.name,
        showlegend=show,
        mode="lines+markers" if line.is_dashed or len(line.x) == 1 else "lines",
        marker={"size": 5},
        line={"color": colour, "width": 1 if line.is_faint else 2, "dash": "dash" if line.is_dashed else "solid"},
        opacity=0.35 if line.is_faint else 1,
        hoverinfo="skip" if line.is_faint else None,
        connectgaps=False,
    )


def _missing(line: Line, chart: Chart) -> go.Scatter:
    """Marks where values are NaN or infinite, at the top of the curve."""
    finite = line.y[line.y > 0] if chart.is_log else line.y
    top = float(finite.max()) if len(finite) else 1.0
    return go.Scatter(
        x=line.missing,
        y=np.full(len(line.missing), top),
        name=f"{line.name}: NaN or infinite",
        legendgroup=line.name,
        showlegend=False,
        mode="markers",
        marker={"symbol": "x", "size": 8, "color": "#c92a2a"},
    )
