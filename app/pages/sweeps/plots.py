"""Plots of a sweep: parallel coordinates, the best value so far, importance of fields, curves of its runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from nnxdsl.sweep.importance import LEAST_POINTS, WIDE, importances, number_in

from ...components.plots import COLOURS, Chart, Line, figure, styled
from ...state import Site
from ...store.series import not_finite, thinned
from ...store.sweeps import Found

CURVES = 40
"""Most runs whose curves are drawn."""


def parallel(found: Found, metric: str) -> go.Figure:
    """Parallel coordinates: an axis for each field in which points differ, and one for the metric, which colours."""
    points = found.ranked(metric)
    values = [point.metrics[metric] for point in points]
    axes = [_axis(path, [point.changes.get(path, "") for point in points]) for path in found.fields]
    drawn = go.Figure(
        go.Parcoords(
            dimensions=[*axes, {"label": metric, "values": values}],
            line={
                "color": values,
                "colorscale": "Viridis",
                "reversescale": found.is_minimized(metric),
                "showscale": True,
            },
            labelangle=-10,
        )
    )
    styled(drawn, 380)
    return drawn.update_layout(margin={"l": 90, "r": 60, "t": 80, "b": 30})


def _axis(path: str, texts: list[str]) -> dict[str, Any]:
    """An axis of numbers, logarithmic if they span a factor of ten, or of names."""
    values = [number_in(text) for text in texts]
    if all(value is not None for value in values):
        numbers = np.array(values, dtype=float)
        if (numbers > 0).all() and numbers.max() > WIDE * numbers.min():
            ticks = np.unique(numbers)
            shown = (
                {"tickvals": np.log10(ticks), "ticktext": [f"{tick:g}" for tick in ticks]} if len(ticks) < 12 else {}
            )
            return {"label": f"{path} (log)", "values": np.log10(numbers), **shown}
        return {"label": path, "values": numbers}
    kinds = list(dict.fromkeys(texts))
    places = {text: place for place, text in enumerate(kinds)}
    names = [text if len(text) < 30 else f"{text[:27]}..." for text in kinds]
    return {
        "label": path,
        "values": [places[text] for text in texts],
        "tickvals": list(places.values()),
        "ticktext": names,
    }


def best_so_far(found: Found, metric: str) -> go.Figure:
    """The metric of each point in their order, and the best until then."""
    points = sorted(found.ranked(metric), key=lambda point: point.number)
    numbers, values = [point.number for point in points], np.array([point.metrics[metric] for point in points])
    best = (np.minimum if found.is_minimized(metric) else np.maximum).accumulate(values)
    drawn = go.Figure(
        [
            go.Scatter(
                x=numbers,
                y=values,
                mode="markers",
                name=metric,
                marker={"color": COLOURS[0], "size": 8},
                text=[point.run for point in points],
                hovertemplate="%{text}: %{y}<extra></extra>",
            ),
            go.Scatter(x=numbers, y=best, mode="lines", name="best so far", line={"color": COLOURS[1], "shape": "hv"}),
        ]
    )
    drawn.update_xaxes(title_text="point")
    drawn.update_yaxes(title_text=metric)
    return styled(drawn)


def importance(found: Found, metric: str) -> go.Figure | None:
    """A bar for each field: how much it matters for the metric; None with too few points.

    Raises:
        RunError: Optuna is not installed.
    """
    points = [(point.changes, point.metrics[metric]) for point in found.ranked(metric)]
    if len(points) < LEAST_POINTS or not (shares := importances(points, minimize=found.is_minimized(metric))):
        return None
    drawn = go.Figure(
        go.Bar(
            x=list(shares.values())[::-1],
            y=list(shares)[::-1],
            orientation="h",
            marker={"color": COLOURS[0]},
            hovertemplate="%{y}: %{x:.1%}<extra></extra>",
        )
    )
    drawn.update_xaxes(title_text="importance (PED-ANOVA)", range=[0, 1], tickformat=".0%")
    drawn.update_yaxes(automargin=True)
    return styled(drawn, 120 + 34 * len(shares))


def curves(site: Site, found: Found, metric: str, field: str, columns: int) -> go.Figure | None:
    """The metric and the loss over steps, a curve for each run, coloured by a field; None without any."""
    kinds = list(dict.fromkeys(point.changes.get(field, "") for point in found.points))
    charts: list[Chart] = []
    for name in dict.fromkeys((metric, "loss", "eval/loss")):
        lines: list[Line] = []
        for point in found.ranked(metric)[:CURVES]:
            if point.row is None:
                continue
            column = site.series.of(point.row.path / "metrics.jsonl").columns.get(name)
            if column is None:
                continue
            steps, values = column.arrays()
            x, y = thinned(steps, values)
            kind = point.changes.get(field, "")
            label = f"{field}={kind}" if field else point.run
            lines.append(Line(label, x, y, colour=kinds.index(kind), missing=not_finite(steps, values)))
        if lines:
            charts.append(Chart(name, lines))
    return figure(charts, "step", columns) if charts else None
