"""Histogram of margins, and rewards over lengths, as plotly figures. Independent of runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from ...components.plots import COLOURS, styled

BINS = 21


def histogram(title: str, values: Sequence[float], name: str) -> go.Figure:
    """Returns a histogram; 0 is the edge of a bin, and bars below it are hatched."""
    low, high = min((0.0, *values)), max((0.0, *values))
    width = (high - low) / (BINS - 1) or 1.0
    first = int(np.floor(low / width))
    last = max(first + 1, int(np.ceil(high / width + 1e-9)))
    edges = np.arange(first, last + 1) * width
    counts, _ = np.histogram(values, edges)
    is_wrong = edges[:-1] < 0
    drawn = go.Figure()
    for group, part, colour, pattern in (("right", ~is_wrong, 0, ""), ("wrong", is_wrong, 1, "/")):
        if counts[part].any():
            drawn.add_bar(
                x=(edges[:-1] + width / 2)[part],
                y=counts[part],
                width=width,
                name=group,
                marker={"color": COLOURS[colour], "pattern": {"shape": pattern}},
                customdata=np.stack([edges[:-1][part], edges[1:][part]], axis=1),
                hovertemplate="%{customdata[0]:.4g} to %{customdata[1]:.4g}: %{y}<extra></extra>",
            )
    drawn.add_vline(0, line={"width": 1, "dash": "dot", "color": "#888"})
    drawn.update_xaxes(title_text=name)
    drawn.update_yaxes(title_text="pairs")
    return _titled(drawn, title)


def scatter(
    title: str,
    groups: Sequence[tuple[str, Sequence[float], Sequence[float], Sequence[str]]],
    x_name: str,
    y_name: str,
) -> go.Figure:
    """Returns points of groups, each with its name, x, y and what is told of each point."""
    drawn = go.Figure()
    for place, (name, xs, ys, told) in enumerate(groups):
        drawn.add_scatter(
            x=xs,
            y=ys,
            name=name,
            mode="markers",
            marker={"symbol": ("circle", "x")[place % 2], "color": COLOURS[place], "size": 7},
            text=told,
            hovertemplate=f"%{{text}}<br>%{{x}} {x_name}, {y_name} %{{y:.4g}}<extra></extra>",
        )
    drawn.add_hline(0, line={"width": 1, "dash": "dot", "color": "#888"})
    drawn.update_xaxes(title_text=x_name)
    drawn.update_yaxes(title_text=y_name)
    return _titled(drawn, title)


def _titled(drawn: go.Figure, title: str) -> go.Figure:
    drawn.update_layout(title={"text": title, "font": {"size": 13}, "x": 0.5, "y": 0.88})
    return styled(drawn)
