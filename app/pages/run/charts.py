"""Curves of one run: the grouping of metrics into charts, their axes, and the estimated time left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
import numpy as np

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status

from ...components.axes import OVER, Axis, axes, offered
from ...components.plots import Chart, Line, Mark, figure
from ...state import Site
from ...store.index import Row
from ...store.series import Columns, not_finite, smoothed, thinned
from ...view import Query, Values, View, is_narrow
from ...words import duration, number, whole

TOGETHER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss", "eval/loss")),
    ("Rewards", ("rewards/chosen", "rewards/rejected", "eval/rewards/chosen", "eval/rewards/rejected")),
    ("Margin", ("rewards/margins", "eval/rewards/margins")),
    ("Accuracy", ("rewards/accuracies", "eval/rewards/accuracies", "mean_token_accuracy", "eval/mean_token_accuracy")),
    ("Gradient norm", ("grad_norm",)),
    ("Learning rate", ("learning_rate",)),
    ("Tokens per second", ("tokens/s",)),
    ("Memory, GiB", ("peak_memory_gib",)),
)
LOGARITHMIC = ("Loss", "Gradient norm", "Learning rate", "Tokens per second")
NOT_ALONE = ("num_tokens", "pairs/s", "samples/s")
SMOOTHING = ("0", "0.6", "0.9", "0.97")
MARKS = 40


class Charts:
    """The tab of curves.

    Attributes:
        outputs: Components that `shown` changes.
    """

    def __init__(self, view: View) -> None:
        """Adds the components."""
        with gr.Group() as controls:
            with gr.Row():
                view.control(
                    "smooth", gr.Dropdown(list(SMOOTHING), value="0", label="Smoothing", info="Weight of the past"), "0"
                )
                over = view.control(
                    "x", gr.Dropdown(list(OVER), value="step", label="Over", info="Horizontal axis"), "step"
                )
            with gr.Row():
                view.control("log", gr.Checkbox(label="Logarithmic", info="Losses, rates, speeds", min_width=140))
                more = view.control(
                    "all", gr.Checkbox(label="All metrics", info="Not only those of the first charts", min_width=140)
                )
        notes, plot = gr.Markdown(), gr.Plot(show_label=False, visible=False)
        self._controls, self._over, self._more, self._notes, self._plot = controls, over, more, notes, plot
        self.outputs = [controls, over, more, notes, plot]

    def shown(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        """Returns the charts with the query's smoothing and axes."""
        series = site.series.of(directory.path / "metrics.jsonl")
        if not series.columns:
            hidden = gr.update(visible=False)
            return {
                self._controls: hidden,
                self._notes: _not_yet(row),
                self._plot: gr.update(visible=False, value=None),
            }
        (axis,) = axes(query.get("x", "step"), [series.columns])
        groups, rest = _groups(series.columns, everything=query.get("all") == "1")
        weight = float(query["smooth"]) if query.get("smooth") in SMOOTHING else 0.0
        charts = [
            Chart(
                title,
                [line for name in names for line in _lines(name, names, series.columns[name], axis, weight)],
                query.get("log") == "1" and title in LOGARITHMIC,
            )
            for title, names in groups.items()
        ]
        marks = _marks(directory, series.starts, axis)
        drawn = figure(charts, axis.name, 1 if is_narrow(query) else 2, marks, own_legends=True)
        return {
            self._controls: gr.update(visible=True),
            self._over: gr.update(choices=list(offered([series.columns]))),
            self._more: gr.update(info=f"{rest} more", visible=rest > 0),
            self._notes: "\n".join(_missing_notes(charts, axis)),
            self._plot: gr.update(visible=True, value=drawn),
        }


def _not_yet(row: Row) -> str:
    stage = {"compiling": "compiling", "starting": "starting"}.get(row.state, "")
    words = f"No step has finished yet{f' (current stage: {stage})' if stage else ''}."
    if row.state == "compiling":
        words += " The first step includes compilation: seconds for small models, minutes for large ones."
    return words


def _groups(columns: Mapping[str, Columns], *, everything: bool) -> tuple[dict[str, list[str]], int]:
    """Metrics of each chart by its title, and how many charts there are besides those that are drawn by default."""
    found: dict[str, list[str]] = {}
    used: set[str] = set(NOT_ALONE)
    for title, names in TOGETHER:
        here = [name for name in names if name in columns]
        if title == "Accuracy" and "rewards/accuracies" in columns:
            here = [name for name in here if "token" not in name]
        used |= set(here)
        if here:
            found[title] = here
    left = [name for name in columns if name not in used]
    rest = sorted(name for name in left if not (name.startswith("eval/") and name[5:] in columns))
    for name in rest if everything else ():
        found[name] = [one for one in (name, f"eval/{name}") if one in columns]
    return found, len(rest)


def _lines(name: str, names: Sequence[str], column: Columns, axis: Axis, weight: float) -> list[Line]:
    """The curve of a metric, with its last value in its name, behind it the unsmoothed one."""
    steps, values = column.arrays()
    is_held_out = name.startswith("eval/")
    steps = axis.at(steps)
    missing = not_finite(steps, values)
    trained = [one for one in names if not one.startswith("eval/")]
    short = name.removeprefix("eval/").rpartition("/")[2] if len(trained) > 1 else name.removeprefix("eval/")
    called = (
        f"{'held out' if is_held_out and len(trained) < 2 else short}{', held out' * is_held_out * (len(trained) > 1)}"
    )
    last = number(float(values[-1])) if np.isfinite(values[-1]) else "not finite"
    colour = trained.index(name.removeprefix("eval/")) if name.removeprefix("eval/") in trained else 0
    found: list[Line] = []
    if weight and not is_held_out:
        found.append(Line(called, *thinned(steps, values), colour=colour, is_faint=True))
        values = smoothed(values, weight)
    line = Line(f"{called} {last}", *thinned(steps, values), colour=colour, is_dashed=is_held_out, missing=missing)
    return [*found, line]


def _missing_notes(charts: Sequence[Chart], axis: Axis) -> list[str]:
    return [
        f"- **!** {chart.title}: {len(line.missing):,} values are NaN or infinite, the first at {axis.name} "
        f"{number(float(line.missing[0]))}."
        for chart in charts
        for line in chart.lines
        if len(line.missing)
    ]


def _marks(directory: RunDirectory, starts: dict[int, int], axis: Axis) -> list[Mark]:
    """Marks for the starts of later attempts, and for checkpoints."""

    def at(step: int, text: str) -> Mark:
        return Mark(float(axis.at(np.asarray(float(step)))), text)

    again = [at(step, f"attempt {number} started at step {step}") for number, step in starts.items() if number > 1]
    saved: list[Mark] = []
    try:
        steps = [whole(entry.name) for entry in directory.checkpoints.iterdir()]
        saved = [at(step, f"checkpoint of step {step}") for step in steps if step is not None]
    except OSError:
        pass
    return [*again, *saved][:MARKS]


def eta_words(series: Any, step: int, total: int, status: Status) -> str:
    """Estimated time left: the run's own estimate, and a range from its recent fast and slow steps."""
    seconds = status.get("eta_seconds")
    rates = series.columns.get("pairs/s") or series.columns.get("samples/s")
    text = f"{duration(seconds)} left"
    if rates is None or len(rates.values) < 12 or seconds is None or not total:
        return text
    recent = np.asarray(rates.values[-60:])
    recent = recent[np.isfinite(recent) & (recent > 0)]
    if len(recent) < 8:
        return text
    pace = float(np.median(recent))
    quick, slow = (seconds * pace / float(np.percentile(recent, share)) for share in (90, 10))
    return f"{text} ({duration(quick)} to {duration(slow)})"
