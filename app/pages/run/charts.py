"""Curves of one run: the grouping of metrics into charts, their axes, and the estimated time left."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status

from ...components.axes import Axis, axes, offered
from ...components.charts import Line, Mark, chart
from ...html import Html, join, link, tag
from ...page import Ask
from ...state import Site
from ...store.index import Row
from ...store.series import Columns, not_finite, smoothed, thinned
from ...words import duration, whole

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


def charts(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    """Returns all charts of a run with the query's smoothing and axes."""
    columns = site.series.of(directory.path / "metrics.jsonl")
    if not columns.columns:
        stage = row.status.get("stage")
        words = f"No step has finished yet{f' (current stage: {stage})' if stage and row.is_live else ''}."
        if row.state == "compiling":
            words += " The first step includes compilation: seconds for small models, minutes for large ones."
        return tag("p", words, cls="empty")
    weight = float(ask.query["smooth"]) if ask.query.get("smooth") in SMOOTHING else 0.0
    (axis,) = axes(ask.query.get("x", "step"), [columns.columns])
    log = ask.query.get("log") == "1"
    marks = _marks(directory, columns.starts, axis)
    present = set(columns.columns)
    drawn: list[Html] = []
    used: set[str] = set(NOT_ALONE)
    for title, names in TOGETHER:
        here = [name for name in names if name in present]
        if title == "Accuracy" and "rewards/accuracies" in present:
            here = [name for name in here if "token" not in name]
        used |= set(here)
        if here:
            drawn.append(_drawn(title, here, columns.columns, axis, weight, log and title in LOGARITHMIC, marks))
    rest = sorted(name for name in present - used if not (name.startswith("eval/") and name[5:] in present))
    if ask.query.get("all") == "1":
        for name in rest:
            both = [name, f"eval/{name}"] if f"eval/{name}" in present else [name]
            drawn.append(_drawn(name, both, columns.columns, axis, weight, False, marks))
    more = link("/run", **{**ask.query, "all": "" if ask.query.get("all") else "1"})
    toggle = tag("a", "Show fewer" if ask.query.get("all") else f"Show {len(rest)} more", href=more, cls="button")
    return join(
        _controls(ask, offered([columns.columns])), tag("div", drawn, cls="grid charts"), toggle if rest else None
    )


def _controls(ask: Ask, names: tuple[str, ...]) -> Html:
    smooth = [
        tag(
            "option",
            "none" if value == "0" else value,
            value="" if value == "0" else value,
            selected=ask.query.get("smooth") == value,
        )
        for value in SMOOTHING
    ]
    over = [
        tag("option", name, value="" if name == "step" else name, selected=ask.query.get("x") == name) for name in names
    ]
    return tag(
        "form",
        tag("label", "Smoothing ", tag("select", smooth, name="smooth")),
        tag("label", "Over ", tag("select", over, name="x")),
        tag(
            "label",
            tag("input", type="checkbox", name="log", checked=ask.query.get("log") == "1"),
            " Logarithmic",
            cls="row",
        ),
        cls="row controls",
        data_query=True,
    )


def _drawn(
    title: str,
    names: list[str],
    columns: dict[str, Columns],
    axis: Axis,
    weight: float,
    log: bool,
    marks: list[Mark],
) -> Html:
    lines: list[Line] = []
    for number, name in enumerate(names):
        steps, values = columns[name].arrays()
        is_held_out = name.startswith("eval/")
        steps = axis.at(steps)
        missing = not_finite(steps, values)
        if weight and not is_held_out:
            faint_x, faint_y = thinned(steps, values)
            lines.append(Line(f"{_called(name)}, unsmoothed", faint_x, faint_y, colour=5))
            values = smoothed(values, weight)
        x, y = thinned(steps, values)
        line = Line(_called(name), x, y, colour=number, dashed=is_held_out, dots=is_held_out, missing=missing)
        lines.append(line)
    return chart(title, lines, marks=marks, log=log, x_name=axis.name)


def _called(name: str) -> str:
    return f"{name.removeprefix('eval/')} (held out)" if name.startswith("eval/") else name


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
