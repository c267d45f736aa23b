"""Metrics and settings of compared groups as tables: those of the page, and one to save as CSV or Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ...words import number
from ..layout.arrays import guarded
from .config import ABSENT, NAMES, brief, differing, paths
from .runs import Group, Spread, depends_on_objective, direction, names_of, spread_of

BETTER = {-1: "lower", 1: "higher", 0: ""}
CHARACTERS = 2_000
"""At most of a value in the table of settings."""


def summary(groups: Sequence[Group], base: Group) -> pd.DataFrame:
    """Returns a row for each metric: which values are better; the last and the best value of each group.

    The last value has its difference to the baseline, the best one its step. Values of several runs are their mean ±
    standard deviation (number of runs).
    """
    changed = differing([group.config for group in groups])
    is_same = not any(path.startswith("objective.") for path in changed)
    rows: list[list[str]] = []
    for name in names_of([run for group in groups for run in group.runs]):
        is_comparable = is_same or not depends_on_objective(name)
        better = BETTER[direction(name)] if is_comparable else "not comparable: objectives differ"
        rows.append([name, better, *_cells(name, groups, base, is_comparable)])
    labels = [f"{group.name} (baseline)" if group is base else group.name for group in groups]
    return pd.DataFrame(rows, columns=["metric", "better", *labels])


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
            at = f" at {number(int(group.each(name, 'step')[0]))}" if group.is_one else ""
            parts.append(f"best {number(best.mean) if group.is_one else best}{at}")
        cells.append(" ".join(parts) or ABSENT)
    return cells


def _whole(value: float) -> str:
    return number(int(value) if value == int(value) and abs(value) >= 1000 else value)


def settings(groups: Sequence[Group], *, everything: bool) -> tuple[str, pd.DataFrame]:
    """Returns what the table has, and the table: a row for each setting that differs, or for all."""
    configs = [group.config for group in groups]
    changed = [path for path in differing(configs) if path not in NAMES]
    shown = paths(configs) if everything else brief(configs, changed)
    words = f"{len(changed)} of {len(paths(configs))} settings differ, not counting names and notes"
    if not changed:
        words = "The settings are equal, except for names and notes"
    if len(shown) < len(changed):
        words += "; an earlier experiment that only some runs have is shown by its name"
    rows = [
        [path, "≠" * (path in changed), *(config.get(path, ABSENT)[:CHARACTERS] for config in configs)]
        for path in shown
    ]
    return f"{words}.", pd.DataFrame(rows, columns=["field", "differs", *(group.name for group in groups)])


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
        spreads = [_spread(value) for value in values]
        rows[f"mean of {name}"] = [one.mean if one else "" for one in spreads]
        rows[f"standard deviation of {name}"] = [one.deviation if one and one.count > 1 else "" for one in spreads]
        rows[f"runs with {name}"] = [one.count if one else 0 for one in spreads]
    table = pd.DataFrame.from_dict(
        rows, orient="index", columns=[guarded(group.name) for group in groups], dtype=object
    )
    return table.to_csv(lineterminator="\n", na_rep="nan")


def _spread(value: Spread | float | None) -> Spread | None:
    return value if value is None or isinstance(value, Spread) else Spread(value, None, 1)


def to_markdown(groups: Sequence[Group]) -> str:
    """Returns a Markdown table; means of several runs are `mean ± standard deviation (runs)`."""
    table = figures(groups)
    rows = [["", *table.columns], ["---"] * (len(groups) + 1)]
    rows += [[str(name), *map(words, values)] for name, values in table.iterrows()]
    return "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in rows)


def words(value: Any) -> str:
    """Returns a value as text; floats with six digits."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    for sign in "\\|<>`*":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ").replace("\r", " ")
