"""Runs that are compared, as plain values: their figures, the best of each; knows no HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from .index import Row
from .run_charts import TOGETHER
from .series import Columns

LOWER = ("loss", "eval/loss")
"""Figures of which the lowest is the best."""

HIGHER = ("accurac", "margins", "tokens/s")
"""Of figures whose names hold one of these, the highest is the best."""


@attrs.frozen
class Compared:
    """One of the runs.

    Attributes:
        row: What the list says of it.
        colour: Of its curves: its place among the runs that the URL names.
        columns: Its figures by name.
        config: Its experiment, flat; empty where it cannot be read.
    """

    row: Row
    colour: int
    columns: Mapping[str, Columns]
    config: Mapping[str, str]


@attrs.frozen
class Figure:
    """A figure of one run: the last, and the best with its step; None where there is none."""

    last: float | None = None
    best: float | None = None
    step: float | None = None


def names_of(runs: Sequence[Compared]) -> list[str]:
    """The figures that are worth a row: those of the charts first, held-out ones after their like."""
    columns = {name for run in runs for name in run.columns}
    first = [name for _, names in TOGETHER for name in names if name in columns]
    rest = sorted(columns - set(first) - {"num_tokens", "pairs/s", "samples/s"})
    return [*first, *rest, *(["num_tokens"] if "num_tokens" in columns else [])]


def figure_of(columns: Columns | None, name: str) -> Figure:
    """The last and the best of a column; a last value that is not finite stays what it is."""
    if columns is None:
        return Figure()
    steps, values = columns.arrays()
    final = float(values[-1]) if len(values) else 0.0
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if not len(values):
        return Figure()
    last = float(values[-1]) if math.isfinite(final) else final
    way = direction(name)
    if way == 0:
        return Figure(last)
    at = int(np.argmin(values) if way < 0 else np.argmax(values))
    return Figure(last, float(values[at]), float(steps[at]))


def depends_on_objective(name: str) -> bool:
    """Whether a figure is in units of the objective: losses, and rewards, which beta multiplies."""
    return "loss" in name or ("rewards/" in name and "accurac" not in name)


def direction(name: str) -> int:
    """-1 where lower is better, 1 where higher is, 0 where neither is."""
    if name in LOWER:
        return -1
    return 1 if any(part in name for part in HIGHER) else 0
