"""Charts that overlay several runs, one colour each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from ...components.axes import Axis, axes
from ...components.plots import Chart, Line, figure
from ...store.series import not_finite, smoothed, thinned
from ...view import Query, is_narrow
from ..run.charts import LOGARITHMIC, NOT_ALONE, SMOOTHING, TOGETHER
from .runs import Compared


def curves(query: Query, runs: Sequence[Compared]) -> go.Figure | None:
    """Returns the charts of runs with the query's smoothing and axes; None without metrics."""
    weight = float(query["smooth"]) if query.get("smooth") in SMOOTHING else 0.0
    shared = axes(query.get("x", "step"), [run.columns for run in runs])
    charts = [
        Chart(title, _lines(names, runs, shared, weight), query.get("log") == "1" and is_log)
        for title, (names, is_log) in _titles(runs, everything=query.get("all") == "1").items()
    ]
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


def _lines(names: list[str], runs: Sequence[Compared], shared: Sequence[Axis], weight: float) -> list[Line]:
    lines: list[Line] = []
    for run, axis in zip(runs, shared, strict=True):
        for name in names:
            if name not in run.columns:
                continue
            steps, values = run.columns[name].arrays()
            is_held_out = name.startswith("eval/")
            steps = axis.at(steps)
            missing = not_finite(steps, values)
            if weight and not is_held_out:
                values = smoothed(values, weight)
            x, y = thinned(steps, values)
            label = f"{run.row.id}{', held out' if is_held_out else ''}"
            lines.append(Line(label, x, y, colour=run.colour, is_dashed=is_held_out, missing=missing))
    return lines
