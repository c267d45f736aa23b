"""Charts that overlay runs, or means over groups of them with a band, one colour each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ...components.axes import Axis, axes
from ...components.metrics import charted, is_log, smoothing
from ...components.plots import Band, Chart, Line, figure
from ...formatting import number
from ...store.series import averaged, not_finite, smoothed, thinned
from ...view import Query, is_narrow
from .runs import Group

BANDS = {"": "standard deviation", "range": "minimum to maximum"}
"""What the band about a mean over runs is, by its part of the query."""


def curves(query: Query, groups: Sequence[Group]) -> go.Figure | None:
    """Returns the charts of groups with the query's smoothing, axes and bands; None without metrics."""
    runs = [run for group in groups for run in group.runs]
    shared = axes(query.get("x", "step"), [run.columns for run in runs])
    by_run = {run.row.id: axis for run, axis in zip(runs, shared, strict=True)}
    titles, _ = charted({name for run in runs for name in run.columns}, query, is_one_each=True)
    charts = [
        Chart(
            title,
            [
                _line(name, group, by_run, query, is_log=is_log(query, title))
                for group in groups
                for name in names
                if any(name in run.columns for run in group.runs)
            ],
            is_log(query, title),
        )
        for title, names in titles.items()
    ]
    return figure(charts, shared[0].name, 1 if is_narrow(query) else 2) if charts else None


def _line(name: str, group: Group, by_run: Mapping[str, Axis], query: Query, *, is_log: bool) -> Line:
    """The curve of a run, or the mean of several and its band; runs are smoothed before they are averaged."""
    is_held_out, is_range = name.startswith("eval/"), query.get("band") == "range"
    weight = 0.0 if is_held_out else smoothing(query)
    series = [(by_run[run.row.id], *run.columns[name].arrays()) for run in group.runs if name in run.columns]
    averages = averaged([(axis.values_at(steps), smoothed(values, weight)) for axis, steps, values in series])
    missing = np.unique(np.concatenate([not_finite(axis.values_at(steps), values) for axis, steps, values in series]))
    x, y = thinned(averages.x, averages.mean)
    band = None
    if not group.is_one:
        index = np.searchsorted(averages.x, x)
        low, high = averages.least, averages.most
        if not is_range:
            low, high = averages.mean - averages.deviation, averages.mean + averages.deviation
        low = np.where(low > 0, low, averages.least) if is_log else low  # a logarithmic axis ends above zero
        low, high = (np.where(averages.count > 1, edge, np.nan)[index] for edge in (low, high))
        spreads = zip(
            *(each[index].tolist() for each in (averages.deviation, averages.least, averages.most)), strict=True
        )
        texts = [_around(*spread, is_range=is_range) for spread in spreads]
        band = Band(low, high, [f"{text}(n={count})" for text, count in zip(texts, averages.count[index], strict=True)])
    label = f"{group.name}{', held out' if is_held_out else ''}"
    return Line(label, x, y, colour=group.colour, is_dashed=is_held_out, missing=missing, band=band)


def _around(deviation: float, least: float, most: float, *, is_range: bool) -> str:
    if not math.isfinite(deviation):
        return ""
    return f"({number(least)} to {number(most)}) " if is_range else f"± {number(deviation)} "
