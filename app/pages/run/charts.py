"""The tab of curves of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import gradio as gr
import numpy as np

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.terminal.plan_format import pluralize

from ...components.metrics import Axis, ChartOptions, axes, charted, is_log, smoothing
from ...components.plots import Chart, Line, figure
from ...formatting import number, whole
from ...state import Site
from ...store.index import Row
from ...store.series import Columns, smoothed, thinned
from ...view import Part, Query, Values, View, is_narrow

MARKS = 40


class Charts(Part):
    """Curves of the run's metrics."""

    def __init__(self, view: View) -> None:
        self.options = ChartOptions(view)
        self.notes, self.plot = gr.Markdown(), gr.Plot(show_label=False, visible=False)

    def fill(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        series = site.series.of(directory.path / "metrics.jsonl")
        if not series.columns:
            hidden = gr.update(visible=False)
            plot = gr.update(visible=False, value=None)
            return {self.options.group: hidden, self.notes: _not_yet(row), self.plot: plot}
        (axis,) = axes(query.get("x", "step"), [series.columns])
        titles, rest = charted(series.columns, query)
        charts = [
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
        placed = [(float(axis.values_at(np.asarray(float(step)))), text) for step, text in marks[:MARKS]]
        return {
            **self.options.fill([series.columns]),
            self.options.group: gr.update(visible=True),
            self.options.more: gr.update(info=f"{rest} more", visible=rest > 0),
            self.notes: "\n".join(_notes(series.damaged, charts, axis)),
            self.plot: gr.update(
                visible=True, value=figure(charts, axis.name, 1 if is_narrow(query) else 2, placed, own_legends=True)
            ),
        }


def _not_yet(row: Row) -> str:
    stage = f" (current stage: {row.state})" if row.state in ("compiling", "starting") else ""
    text = f"No step has finished yet{stage}."
    if row.state == "compiling":
        text += " The first step includes compilation: seconds for small models, minutes for large ones."
    return text


def _lines(name: str, names: Sequence[str], column: Columns, axis: Axis, weight: float) -> list[Line]:
    """The curve of a metric, with its last value in its name, behind it the unsmoothed one."""
    steps, values = column.arrays()
    places, last = axis.values_at(steps), number(float(values[-1])) if np.isfinite(values[-1]) else "not finite"
    trained = list(dict.fromkeys(one.removeprefix("eval/") for one in names))
    base, is_held_out = name.removeprefix("eval/"), name.startswith("eval/")
    called = base.rpartition("/")[2] if len(trained) > 1 else "" if is_held_out else base
    called = ", ".join(filter(None, (called, "held out" if is_held_out else "")))
    colour = trained.index(base)
    line = Line.of(f"{called} {last}", places, values, colour=colour, is_dashed=is_held_out, hover_name=called)
    if not weight or is_held_out:
        return [line]
    x, y = thinned(places, smoothed(values, weight))
    smooth = Line(line.name, x, y, colour, missing=line.missing, hover_name=f"{called}, smoothed")
    return [Line(called, line.x, line.y, colour, is_faint=True), smooth]


def _notes(damaged: int, charts: Sequence[Chart], axis: Axis) -> Iterator[str]:
    """Yields what is wrong with the file of metrics, and with their values."""
    if damaged:
        yield f"- **!** {pluralize(damaged, 'row')} of metrics.jsonl cannot be read and are left out."
    for chart in charts:
        for line in chart.lines:
            if count := len(line.missing):
                values = "value is" if count == 1 else "values are"
                text = f"{count:,} {values} NaN or infinite, the first at {axis.name}"
                yield f"- **!** {chart.title}: {text} {number(float(line.missing[0]))}."
