"""Charts that overlay runs, or means over groups of them with a band, one colour each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ...components.metrics import Axis, axes, charted, is_log, smoothing
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
    x, y = thinned(averages.index.to_numpy(), averages["mean"].to_numpy())
    band = None
    if not group.is_one:
        spread = averages.loc[x]
        low, high = spread["min"], spread["max"]
        if not is_range:
            low, high = spread["mean"] - spread["std"], spread["mean"] + spread["std"]
        low = low.where(low > 0, spread["min"]) if is_log else low  # a logarithmic axis ends above zero
        texts: list[str] = []
        for one in spread.to_dict("records"):
            around = f"({number(one['min'])} to {number(one['max'])})" if is_range else f"± {number(one['std'])}"
            texts.append(f"{f'{around} ' if one['count'] > 1 else ''}(n={one['count']})")
        band = Band(*(edge.where(spread["count"] > 1).to_numpy() for edge in (low, high)), texts)
    label = f"{group.name}{', held out' if is_held_out else ''}"
    return Line(label, x, y, colour=group.colour, is_dashed=is_held_out, missing=missing, band=band)
