"""The tab of curves of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import gradio as gr
import numpy as np

from nnxdsl.runs.run_dir import RunDirectory

from ...components.axes import Axis, axes, offered
from ...components.metrics import charted, controls, is_log, smoothing
from ...components.plots import Chart, Line, Mark, figure
from ...state import Site
from ...store.index import Row
from ...store.series import Columns, smoothed, thinned
from ...view import Query, Values, View, is_narrow
from ...words import number, whole
from .files import Shows

MARKS = 40


def charts(view: View) -> Shows:
    """Adds the tab: charts with the query's smoothing and axes."""
    chosen = controls(view)
    notes, plot = gr.Markdown(), gr.Plot(show_label=False, visible=False)

    def shown(site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        series = site.series.of(directory.path / "metrics.jsonl")
        if not series.columns:
            hidden = gr.update(visible=False)
            return {chosen.group: hidden, notes: _not_yet(row), plot: gr.update(visible=False, value=None)}
        (axis,) = axes(query.get("x", "step"), [series.columns])
        titles, rest = charted(series.columns, query)
        drawn = [
            Chart(
                title,
                [line for name in names for line in _lines(name, names, series.columns[name], axis, smoothing(query))],
                is_log(query, title),
            )
            for title, names in titles.items()
        ]
        marks = [(step, f"attempt {one} started at step {step}") for one, step in series.starts.items() if one > 1]
        saved = [whole(place.name) for place in directory.checkpoints.glob("*")]
        marks += [(step, f"checkpoint of step {step}") for step in saved if step is not None]
        return {
            chosen.group: gr.update(visible=True),
            chosen.over: gr.update(choices=list(offered([series.columns]))),
            chosen.more: gr.update(info=f"{rest} more", visible=rest > 0),
            notes: "\n".join(_missing(drawn, axis)),
            plot: gr.update(
                visible=True,
                value=figure(
                    drawn,
                    axis.name,
                    1 if is_narrow(query) else 2,
                    [Mark(float(axis.at(np.asarray(float(step)))), text) for step, text in marks[:MARKS]],
                    own_legends=True,
                ),
            ),
        }

    return shown


def _not_yet(row: Row) -> str:
    stage = f" (current stage: {row.state})" if row.state in ("compiling", "starting") else ""
    words = f"No step has finished yet{stage}."
    if row.state == "compiling":
        words += " The first step includes compilation: seconds for small models, minutes for large ones."
    return words


def _lines(name: str, names: Sequence[str], column: Columns, axis: Axis, weight: float) -> list[Line]:
    """The curve of a metric, with its last value in its name, behind it the unsmoothed one."""
    steps, values = column.arrays()
    places, last = axis.at(steps), number(float(values[-1])) if np.isfinite(values[-1]) else "not finite"
    trained = list(dict.fromkeys(one.removeprefix("eval/") for one in names))
    own, is_held_out = name.removeprefix("eval/"), name.startswith("eval/")
    called = own.rpartition("/")[2] if len(trained) > 1 else "" if is_held_out else own
    called = ", ".join(filter(None, (called, "held out" if is_held_out else "")))
    colour = trained.index(own)
    line = Line.of(f"{called} {last}", places, values, colour=colour, is_dashed=is_held_out, hover_name=called)
    if not weight or is_held_out:
        return [line]
    x, y = thinned(places, smoothed(values, weight))
    smooth = Line(line.name, x, y, colour, missing=line.missing, hover_name=f"{called}, smoothed")
    return [Line(called, line.x, line.y, colour, is_faint=True), smooth]


def _missing(charts: Sequence[Chart], axis: Axis) -> Iterator[str]:
    """What is said of values that are not finite."""
    for chart in charts:
        for line in chart.lines:
            if count := len(line.missing):
                values = "value is" if count == 1 else "values are"
                words = f"{count:,} {values} NaN or infinite, the first at {axis.name}"
                yield f"- **!** {chart.title}: {words} {number(float(line.missing[0]))}."
