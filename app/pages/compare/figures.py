"""The table of metrics: last and best value of each run or group, and the difference to the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from ...words import number
from .config import differing
from .groups import Group
from .runs import depends_on_objective, direction, names_of

BETTER = {-1: "lower", 1: "higher", 0: ""}


def summary(groups: Sequence[Group], base: Group) -> pd.DataFrame:
    """Returns a row for each metric: which values are better; the last and the best value of each group.

    The last value has its difference to the baseline, the best one its step. Values of several runs are their mean ±
    standard deviation (number of runs).
    """
    changed = differing([group.config for group in groups])
    is_same = not any(path.startswith("objective.") for path in changed)
    names = names_of([run for group in groups for run in group.runs])
    rows = [_row(name, groups, base, is_same or not depends_on_objective(name)) for name in names]
    return pd.DataFrame(rows, columns=["metric", "better", *(_label(group, base) for group in groups)])


def _label(group: Group, base: Group) -> str:
    return f"{group.name} (baseline)" if group is base else group.name


def _row(name: str, groups: Sequence[Group], base: Group, comparable: bool) -> list[str]:
    way = direction(name)
    lasts = [spread.mean for group in groups if (spread := group.last(name)) is not None]
    differ = comparable and len(lasts) > 1 and min(lasts) < max(lasts)
    top = (min(lasts) if way < 0 else max(lasts)) if way and differ else None
    reference = base.last(name)
    cells: list[str] = []
    for group in groups:
        figures, last, best = group.figures(name), group.last(name), group.best(name)
        if not figures:
            cells.append("-")
            continue
        parts: list[str] = []
        if last is not None:
            text = number(_whole(last.mean)) if group.is_one else str(last)
            parts.append(f"★ {text}" if top is not None and last.mean == top else text)
        if lost := sum(not math.isfinite(figure.last or 0.0) for figure in figures):
            parts.append("not finite" if group.is_one else f"{lost} not finite")
        if group is not base and last is not None and reference is not None and comparable:
            parts.append(f"({_signed(last.mean - reference.mean)})")
        if best is not None:
            at = f" at {number(int(figures[0].step or 0))}" if group.is_one else ""
            parts.append(f"best {number(best.mean) if group.is_one else best}{at}")
        cells.append(" ".join(parts))
    return [name, BETTER[way] if comparable else "not comparable: objectives differ", *cells]


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) and abs(value) >= 1000 else value


def _signed(value: float) -> str:
    sign = "+" if value > 0 else "-" if value < 0 else "±"
    return f"{sign}{number(_whole(abs(value)))}"
