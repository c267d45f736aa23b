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
from ...store.sweeps import OpenedSweep

CURVES = 40  # most runs whose curves are drawn


def parallel(sweep: OpenedSweep, metric: str) -> go.Figure:
    """Parallel coordinates: an axis for each field in which points differ, and one for the metric, which colours."""
    points = sweep.ranked(metric)
    values = [point.metrics[metric] for point in points]
    axes = [_axis(path, [point.changes.get(path, "") for point in points]) for path in sweep.fields]
    # Plotly widens the scale of one value, to values that no point has.
    colours = {"colorscale": "Portland", "reversescale": sweep.is_minimized(metric), "showscale": len({*values}) > 1}
    dimensions = [*axes, {"label": metric, "values": values}]
    plot = styled(
        go.Figure(go.Parcoords(dimensions=dimensions, line={"color": values, **colours}, labelangle=-10)), 380
    )
    return plot.update_layout(margin={"l": 90, "r": 60, "t": 80, "b": 30})


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


def best_so_far(sweep: OpenedSweep, metric: str) -> go.Figure:
    """The metric of each point in their order, and the best until then."""
    points = sorted(sweep.ranked(metric), key=lambda point: point.point)
    values = pd.Series([point.metrics[metric] for point in points])
    best = values.cummin() if sweep.is_minimized(metric) else values.cummax()
    numbers, runs = [point.point for point in points], [point.run for point in points]
    plot = px.scatter(x=numbers, y=values, labels={"x": "point", "y": metric}, hover_name=runs)
    plot.update_traces(name=metric, showlegend=True, marker={"color": COLOURS[0], "size": 8})
    plot.add_scatter(x=numbers, y=best, mode="lines", name="best so far", line={"color": COLOURS[1], "shape": "hv"})
    plot.update_xaxes(tick0=0, dtick=max(1, -(-len(sweep.points) // 10)))  # points are counted in whole numbers
    return styled(plot)


def importance(sweep: OpenedSweep, metric: str) -> go.Figure | None:
    """A bar for each field: how much it matters for the metric; None with too few points, raises without Optuna."""
    points = [(point.changes, point.metrics[metric]) for point in sweep.ranked(metric)]
    if len(points) < MIN_POINTS or not (shares := importances(points, minimize=sweep.is_minimized(metric))):
        return None
    labels = {"x": "importance (PED-ANOVA)", "y": ""}
    plot = px.bar(x=[*shares.values()][::-1], y=[*shares][::-1], labels=labels, range_x=[0, 1], orientation="h")
    plot.update_traces(marker={"color": COLOURS[0]}, hovertemplate="%{y}: %{x:.1%}<extra></extra>")
    plot.update_xaxes(tickformat=".0%")
    plot.update_yaxes(automargin=True)
    return styled(plot, 120 + 34 * len(shares))


def curves(site: Site, sweep: OpenedSweep, metric: str, field: str, columns: int) -> go.Figure | None:
    """The metric and the loss over steps, a curve for each run, coloured by a field; None without any."""
    kinds = list(dict.fromkeys(point.changes.get(field, "") for point in sweep.points))
    lines: dict[str, list[Line]] = {name: [] for name in (metric, "loss", "eval/loss")}
    for point in sweep.ranked(metric)[:CURVES]:
        series = {} if point.row is None else site.series.of(point.row.path / "metrics.jsonl").columns
        kind = point.changes.get(field, "")
        for name in lines.keys() & series.keys():
            label = f"{field}={kind}" if field else point.run
            lines[name].append(Line.of(label, *series[name].arrays(), colour=kinds.index(kind)))
    charts = [Chart(title_of(name), each) for name, each in lines.items() if each]
    return figure(charts, "step", columns) if charts else None
