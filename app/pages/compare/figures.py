"""The table of metrics: last and best value of each run, and the difference to the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from ...words import number
from .config import differing
from .runs import Compared, depends_on_objective, direction, figure_of, names_of

BETTER = {-1: "lower", 1: "higher", 0: ""}


def summary(runs: Sequence[Compared], base: Compared) -> pd.DataFrame:
    """Returns a row for each metric: which values are better; the last and the best value of each run.

    The last value has its difference to the baseline, the best one its step.
    """
    changed = differing([run.config for run in runs])
    is_same = not any(path.startswith("objective.") for path in changed)
    rows = [_row(name, runs, base, is_same or not depends_on_objective(name)) for name in names_of(runs)]
    return pd.DataFrame(rows, columns=["metric", "better", *(_label(run, base) for run in runs)])


def _label(run: Compared, base: Compared) -> str:
    return f"{run.row.id} (baseline)" if run is base else run.row.id


def _row(name: str, runs: Sequence[Compared], base: Compared, comparable: bool) -> list[str]:
    figures = [figure_of(run.columns.get(name), name) for run in runs]
    way = direction(name)
    lasts = [figure.last for figure in figures if figure.last is not None and math.isfinite(figure.last)]
    differ = comparable and len(lasts) > 1 and min(lasts) < max(lasts)
    top = (min(lasts) if way < 0 else max(lasts)) if way and differ else None
    reference = figure_of(base.columns.get(name), name).last
    cells: list[str] = []
    for run, figure in zip(runs, figures, strict=True):
        if figure.last is None:
            cells.append("-")
            continue
        text = number(_whole(figure.last)) if math.isfinite(figure.last) else "not finite"
        parts = [f"★ {text}" if top is not None and figure.last == top else text]
        if run is not base and reference is not None and comparable and math.isfinite(figure.last - reference):
            parts.append(f"({_signed(figure.last - reference)})")
        if figure.best is not None and figure.step is not None:
            parts.append(f"best {number(figure.best)} at {number(int(figure.step))}")
        cells.append(" ".join(parts))
    return [name, BETTER[way] if comparable else "not comparable: objectives differ", *cells]


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) and abs(value) >= 1000 else value


def _signed(value: float) -> str:
    sign = "+" if value > 0 else "-" if value < 0 else "±"
    return f"{sign}{number(_whole(abs(value)))}"
