"""Metrics and settings of compared groups: tables of the page, and what is saved as CSV, Markdown or HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import plotly.io

from ...formatting import number
from ...markup import Html, join, tag
from ...view import Query
from ..layout.arrays import guarded
from .config import ABSENT, NAMES, brief, differing, paths
from .curves import curves
from .runs import Group, Spread, direction, names_of, spread_of

BETTER = {-1: "lower", 1: "higher", 0: ""}
CHARACTERS = 2_000  # at most of a value in the table of settings


SPREAD = "Values of several runs are mean ± sample standard deviation (number of runs)."
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;margin:1rem 0}"
    "th,td{border:1px solid #ddd;padding:.25rem .6rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}th,td{border-color:#444}}"
)
FACTS = {"Objective": "objective", "Model": "model", "Trained": "adapter", "Devices": "mesh"}


def summary(groups: Sequence[Group], base: Group) -> pd.DataFrame:
    """Returns a row for each metric: which values are better; the last and the best value of each group.

    The last value has its difference to the baseline, the best one its step. Values of several runs are their mean ±
    standard deviation (number of runs).
    """
    changed = differing([group.config for group in groups])
    rows: list[list[str]] = []
    for name in names_of([run for group in groups for run in group.runs]):
        why = why_not_ranked(name, changed)
        better = f"not comparable: {why}" if why else BETTER[direction(name)]
        rows.append([name, better, *_cells(name, groups, base, not why)])
    labels = [f"{group.name} (baseline)" if group is base else group.name for group in groups]
    return pd.DataFrame(rows, columns=["metric", "better", *labels])


def why_not_ranked(name: str, changed: Sequence[str]) -> str:
    """Returns the difference between settings that makes a metric incomparable; empty if none does."""

    def differs(root: str) -> bool:
        return any(f"{path}.".startswith(f"{root}.") for path in changed)

    is_of_objective = "loss" in name or ("rewards/" in name and "accurac" not in name)  # its unit; beta scales rewards
    if is_of_objective and differs("objective"):
        return "objectives differ"
    if direction(name) and "/s" not in name and differs("evaluation.data" if name.startswith("eval/") else "data"):
        return "held-out data differ" if name.startswith("eval/") else "data differ"
    return ""


def _cells(name: str, groups: Sequence[Group], base: Group, is_comparable: bool) -> list[str]:
    way, spreads = direction(name), [spread_of(group.each(name, "last")) for group in groups]
    lasts = [spread.mean for spread in spreads if spread is not None]
    is_ranked = way and is_comparable and len(lasts) > 1 and min(lasts) < max(lasts)
    top = (min(lasts) if way < 0 else max(lasts)) if is_ranked else None
    reference = spread_of(base.each(name, "last")) if is_comparable else None
    cells: list[str] = []
    for group, last in zip(groups, spreads, strict=True):
        parts: list[str] = []
        if last is not None:
            parts.append(f"{'★ ' * (last.mean == top)}{_whole(last.mean) if group.is_one else last}")
        if lost := sum(not math.isfinite(value) for value in group.each(name, "last")):
            parts.append("not finite" if group.is_one else f"{lost} not finite")
        if group is not base and last is not None and reference is not None:
            change = last.mean - reference.mean
            parts.append(f"({'+' if change > 0 else '-' if change < 0 else '±'}{_whole(abs(change))})")
        if best := spread_of(group.each(name, "best")):
            step = f" at {number(int(group.each(name, 'step')[0]))}" if group.is_one else ""
            parts.append(f"best {number(best.mean) if group.is_one else best}{step}")
        cells.append(" ".join(parts) or ABSENT)
    return cells


def _whole(value: float) -> str:
    return number(int(value) if value == int(value) and abs(value) >= 1000 else value)


def settings(groups: Sequence[Group], *, everything: bool) -> tuple[str, pd.DataFrame]:
    """Returns what the table has, and the table: a row for each setting that differs, or for all."""
    configs = [group.config for group in groups]
    changed = [path for path in differing(configs) if path not in NAMES]
    shown = paths(configs) if everything else brief(configs, changed)
    text = f"{len(changed)} of {len(paths(configs))} settings differ, not counting names and notes"
    if not changed:
        text = "The settings are equal, except for names and notes"
    if len(shown) < len(changed):
        text += "; an earlier experiment that only some runs have is shown by its name"
    rows = [
        [path, "≠" * (path in changed), *(config.get(path, ABSENT)[:CHARACTERS] for config in configs)]
        for path in shown
    ]
    return f"{text}.", pd.DataFrame(rows, columns=["field", "≠", *(group.name for group in groups)])


def figures(groups: Sequence[Group]) -> pd.DataFrame:
    """Returns a row for each metric, then for each setting that differs, and a column for each group.

    A value of several runs is a `Spread`.
    """
    states = [Counter(run.row.state for run in group.runs) for group in groups]
    rows: dict[str, list[Any]] = {}
    if not all(group.is_one for group in groups):
        rows["runs"] = [", ".join(run.row.id for run in group.runs) for group in groups]
    rows["state"] = [
        ", ".join(state if group.is_one else f"{count} {state}" for state, count in counts.items())
        for group, counts in zip(groups, states, strict=True)
    ]
    for name in names_of([run for group in groups for run in group.runs]):
        rows[f"last {name}"] = [group.value(name, "last") for group in groups]
        if direction(name):
            rows[f"best {name}"] = [group.value(name, "best") for group in groups]
        if direction(name) and any(group.is_one for group in groups):
            rows[f"step of best {name}"] = [group.value(name, "step") if group.is_one else None for group in groups]
    configs = [group.config for group in groups]
    rows |= {path: [config.get(path, ABSENT) for config in configs] for path in differing(configs)}
    return pd.DataFrame.from_dict(rows, orient="index", columns=[group.name for group in groups], dtype=object)


def to_csv(groups: Sequence[Group]) -> str:
    """Returns CSV; means of several runs are followed by rows of their standard deviations and numbers of runs."""
    rows: dict[str, list[Any]] = {}
    for name, values in figures(groups).iterrows():
        if not any(isinstance(value, Spread) for value in values):
            cells = ["" if value is None else value for value in values]
            rows[guarded(name)] = [guarded(cell) if isinstance(cell, str) else cell for cell in cells]
            continue
        spreads = [value if value is None or isinstance(value, Spread) else Spread(value, None, 1) for value in values]
        rows[f"mean of {name}"] = [one.mean if one else "" for one in spreads]
        rows[f"standard deviation of {name}"] = [one.deviation if one and one.count > 1 else "" for one in spreads]
        rows[f"runs with {name}"] = [one.count if one else 0 for one in spreads]
    table = pd.DataFrame.from_dict(
        rows, orient="index", columns=[guarded(group.name) for group in groups], dtype=object
    )
    return table.to_csv(lineterminator="\n", na_rep="nan")


def to_markdown(groups: Sequence[Group]) -> str:
    """Returns a Markdown table; means of several runs are `mean ± standard deviation (runs)`."""
    table = figures(groups)
    rows = [["", *table.columns], ["---"] * (len(groups) + 1)]
    rows += [[str(name), *map(_text, values)] for name, values in table.iterrows()]
    return "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in rows)


def to_html(groups: Sequence[Group], query: Query) -> str:
    """Returns an HTML document with the script that draws the query's curves; it requests nothing."""
    runs = [run for group in groups for run in group.runs]
    title = ", ".join(group.name for group in groups)
    plots = curves({**query, "all": "1"}, groups)
    charts = "" if plots is None else plotly.io.to_html(plots, include_plotlyjs=True, full_html=False)
    head = join(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width">'),
        tag("title", f"{title} · nnxdsl"),
        Html(f"<style>{STYLE}</style>"),
    )
    facts = {
        name: [", ".join(dict.fromkeys(run.row.facts.get(key, "") for run in group.runs)) for group in groups]
        for name, key in FACTS.items()
    }
    about = pd.DataFrame.from_dict(facts, orient="index", columns=[group.name for group in groups])
    body = join(
        tag("h1", title),
        tag("p", f"Written by nnxdsl at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."),
        _table(about),
        tag("h2", "Metrics, and settings that differ" if len(groups) > 1 else "Metrics"),
        tag("p", SPREAD) if len(runs) > len(groups) else None,
        _table(figures(groups).map(_text)),
        tag("h2", "Curves"),
        Html(charts or "<p>No step has finished.</p>"),
        [
            tag("details", tag("summary", f"All settings of {run.row.id}"), _table(pd.Series(run.config).to_frame("")))
            for run in runs
        ],
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _table(table: pd.DataFrame) -> Html:
    with pd.option_context("display.max_colwidth", None):
        return Html(table.to_html(border=0, escape=True))


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    for sign in "\\|<>`*":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ").replace("\r", " ")
