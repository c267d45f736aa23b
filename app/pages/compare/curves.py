"""Charts that overlay runs, or means over groups of them with a band, one colour each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ...components.axes import Axis, axes
from ...components.plots import Band, Chart, Line, figure
from ...store.series import averaged, not_finite, smoothed, thinned
from ...view import Query, is_narrow
from ...words import number
from ..run.charts import LOGARITHMIC, NOT_ALONE, SMOOTHING, TOGETHER
from .groups import Group
from .runs import Compared

BANDS = {"": "standard deviation", "range": "minimum to maximum"}
"""What the band about a mean over runs is, by its part of the query."""


def curves(query: Query, groups: Sequence[Group]) -> go.Figure | None:
    """Returns the charts of groups with the query's smoothing, axes and bands; None without metrics."""
    weight = float(query["smooth"]) if query.get("smooth") in SMOOTHING else 0.0
    runs = [run for group in groups for run in group.runs]
    shared = axes(query.get("x", "step"), [run.columns for run in runs])
    by_run = {run.row.id: axis for run, axis in zip(runs, shared, strict=True)}
    is_log, is_range = query.get("log") == "1", query.get("band") == "range"
    charts: list[Chart] = []
    for title, (names, may_be_log) in _titles(runs, everything=query.get("all") == "1").items():
        logarithmic = is_log and may_be_log
        lines = [
            _line(name, group, by_run, weight, is_range=is_range, is_log=logarithmic)
            for group in groups
            for name in names
            if any(name in run.columns for run in group.runs)
        ]
        charts.append(Chart(title, lines, logarithmic))
    return figure(charts, shared[0].name, 1 if is_narrow(query) else 2) if charts else None


def _titles(runs: Sequence[Compared], *, everything: bool) -> Mapping[str, tuple[list[str], bool]]:
    """By title, the metrics of a chart, and whether it may be logarithmic."""
    columns = {name for run in runs for name in run.columns}
    found: dict[str, tuple[list[str], bool]] = {}
    used: set[str] = set(NOT_ALONE)
    for title, names in TOGETHER:
        trained = [name for name in names if not name.startswith("eval/")]
        for name in trained:
            both = [one for one in (name, f"eval/{name}") if one in columns]
            used |= {name, f"eval/{name}"}
            if both:
                found[title if len(trained) == 1 else _heading(name)] = both, title in LOGARITHMIC
    for name in sorted({name.removeprefix("eval/") for name in columns - used}) if everything else ():
        found[name] = [one for one in (name, f"eval/{name}") if one in columns], False
    return found


def _heading(name: str) -> str:
    words = name.replace("/", " ").replace("_", " ")
    return words[:1].upper() + words[1:]


def _line(name: str, group: Group, by_run: Mapping[str, Axis], weight: float, *, is_range: bool, is_log: bool) -> Line:
    """The curve of a run, or the mean of several and its band; runs are smoothed before they are averaged."""
    members = [run for run in group.runs if name in run.columns]
    found = averaged([_series(name, run, by_run, weight) for run in members])
    missing = np.unique(np.concatenate([not_finite(*_series(name, run, by_run, 0.0)) for run in members]))
    x, y = thinned(found.x, found.mean)
    band = None
    if not group.is_one:
        at = np.searchsorted(found.x, x)
        low, high = found.least, found.most
        if not is_range:
            low, high = found.mean - found.deviation, found.mean + found.deviation
        low = np.where(low > 0, low, found.least) if is_log else low  # a logarithmic axis ends above zero
        low, high = (np.where(found.count > 1, edge, np.nan)[at] for edge in (low, high))
        spreads = zip(*(each[at].tolist() for each in (found.deviation, found.least, found.most)), strict=True)
        texts = [_around(*spread, is_range=is_range) for spread in spreads]
        band = Band(low, high, [f"{text}(n={count})" for text, count in zip(texts, found.count[at], strict=True)])
    is_held_out = name.startswith("eval/")
    label = f"{group.name}{', held out' if is_held_out else ''}"
    return Line(label, x, y, colour=group.colour, is_dashed=is_held_out, missing=missing, band=band)


def _around(deviation: float, least: float, most: float, *, is_range: bool) -> str:
    if not math.isfinite(deviation):
        return ""
    return f"({number(least)} to {number(most)}) " if is_range else f"± {number(float(deviation))} "


def _series(name: str, run: Compared, by_run: Mapping[str, Axis], weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of a metric of a run; those of training are smoothed."""
    steps, values = run.columns[name].arrays()
    x = by_run[run.row.id].at(steps)
    return x, smoothed(values, weight) if weight and not name.startswith("eval/") else values
