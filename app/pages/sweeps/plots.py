"""Plots of a sweep: parallel coordinates, the best value so far, importance of fields, curves of its runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from nnxdsl.sweep.importance import LOG_RATIO, MIN_POINTS, importances, number_in

from ...components.metrics import title_of
from ...components.plots import COLOURS, Chart, Line, figure, styled
from ...state import Site
from ...store.sweeps import Found

CURVES = 40
"""Most runs whose curves are drawn."""


def parallel(found: Found, metric: str) -> go.Figure:
    """Parallel coordinates: an axis for each field in which points differ, and one for the metric, which colours."""
    points = found.ranked(metric)
    values = [point.metrics[metric] for point in points]
    axes = [_axis(path, [point.changes.get(path, "") for point in points]) for path in found.fields]
    # Plotly widens the scale of one value, to values that no point has.
    colours = {"colorscale": "Portland", "reversescale": found.is_minimized(metric), "showscale": len({*values}) > 1}
    dimensions = [*axes, {"label": metric, "values": values}]
    drawn = styled(
        go.Figure(go.Parcoords(dimensions=dimensions, line={"color": values, **colours}, labelangle=-10)), 380
    )
    return drawn.update_layout(margin={"l": 90, "r": 60, "t": 80, "b": 30})


def _axis(path: str, texts: list[str]) -> dict[str, Any]:
    """An axis of numbers, logarithmic if they span a factor of ten, or of names."""
    values = [number_in(text) for text in texts]
    if None in values:
        places, kinds = pd.factorize(np.array(texts, dtype=object))
        names = [text if len(text) < 30 else f"{text[:27]}..." for text in kinds]
        return {"label": path, "values": places, "tickvals": list(range(len(kinds))), "ticktext": names}
    numbers = np.array(values, dtype=float)
    is_log = (numbers > 0).all() and numbers.max() > LOG_RATIO * numbers.min()
    places, ticks = (np.log10(each) if is_log else each for each in (numbers, np.unique(numbers)))
    names = [f"{number:g}" for number in np.unique(numbers)]
    shown = {"tickvals": ticks, "ticktext": names} if len(ticks) < 12 else {}
    return {"label": f"{path} (log)" if is_log else path, "values": places, **shown}


def best_so_far(found: Found, metric: str) -> go.Figure:
    """The metric of each point in their order, and the best until then."""
    points = sorted(found.ranked(metric), key=lambda point: point.number)
    values = pd.Series([point.metrics[metric] for point in points])
    best = values.cummin() if found.is_minimized(metric) else values.cummax()
    numbers, runs = [point.number for point in points], [point.run for point in points]
    drawn = px.scatter(x=numbers, y=values, labels={"x": "point", "y": metric}, hover_name=runs)
    drawn.update_traces(name=metric, showlegend=True, marker={"color": COLOURS[0], "size": 8})
    drawn.add_scatter(x=numbers, y=best, mode="lines", name="best so far", line={"color": COLOURS[1], "shape": "hv"})
    drawn.update_xaxes(tick0=0, dtick=max(1, -(-len(found.points) // 10)))  # points are counted in whole numbers
    return styled(drawn)


def importance(found: Found, metric: str) -> go.Figure | None:
    """A bar for each field: how much it matters for the metric; None with too few points.

    Raises:
        RunError: Optuna is not installed.
    """
    points = [(point.changes, point.metrics[metric]) for point in found.ranked(metric)]
    if len(points) < MIN_POINTS or not (shares := importances(points, minimize=found.is_minimized(metric))):
        return None
    labels = {"x": "importance (PED-ANOVA)", "y": ""}
    drawn = px.bar(x=[*shares.values()][::-1], y=[*shares][::-1], labels=labels, range_x=[0, 1], orientation="h")
    drawn.update_traces(marker={"color": COLOURS[0]}, hovertemplate="%{y}: %{x:.1%}<extra></extra>")
    drawn.update_xaxes(tickformat=".0%")
    drawn.update_yaxes(automargin=True)
    return styled(drawn, 120 + 34 * len(shares))


def curves(site: Site, found: Found, metric: str, field: str, columns: int) -> go.Figure | None:
    """The metric and the loss over steps, a curve for each run, coloured by a field; None without any."""
    kinds = list(dict.fromkeys(point.changes.get(field, "") for point in found.points))
    lines: dict[str, list[Line]] = {name: [] for name in (metric, "loss", "eval/loss")}
    for point in found.ranked(metric)[:CURVES]:
        series = {} if point.row is None else site.series.of(point.row.path / "metrics.jsonl").columns
        kind = point.changes.get(field, "")
        for name in lines.keys() & series.keys():
            label = f"{field}={kind}" if field else point.run
            lines[name].append(Line.of(label, *series[name].arrays(), colour=kinds.index(kind)))
    drawn = [Chart(title_of(name), each) for name, each in lines.items() if each]
    return figure(drawn, "step", columns) if drawn else None
