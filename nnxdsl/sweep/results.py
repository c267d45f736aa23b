"""The results of a sweep as rows: the differences between its runs, their states, and the metric that sorts them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from nnxdsl.config.core.codegen import render
from nnxdsl.config.sweep import Direction
from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.run_list import last_metrics
from nnxdsl.terminal.display import number
from nnxdsl.terminal.tables import Column, show_table

DEFAULT_METRICS = ("eval/rewards/accuracies", "eval/reward", "eval/loss", "loss")
"""The metrics by which results are sorted by default: the first that exists."""

SMALL_IS_GOOD = ("loss", "perplexity", "nll", "norm", "kl")


@attrs.frozen
class Row:
    """One point of a sweep, or one trial of a search.

    Attributes:
        point: Its number, from 0.
        run: The id of its run.
        changes: Changed fields of the base, by path.
        state: The state of its run.
        step: Its last reported step.
        value: The metric; None where the run has none yet.
        error: Why it failed.
    """

    point: int
    run: str
    changes: Mapping[str, object]
    state: str
    step: int | None = None
    value: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values; changes as Python source."""
        fields = attrs.asdict(self, recurse=False)
        value = self.value if self.value is None or math.isfinite(self.value) else str(self.value)
        return {**fields, "value": value, "changes": {path: render(change) for path, change in self.changes.items()}}


def evaluation_values(run: Path, metric: str) -> list[tuple[int, float]]:
    """The values of a metric at each evaluation: pairs of step and value."""
    try:
        rows = RunDirectory(run).evaluations()
    except RunError:
        return []
    return [
        (row["step"], float(row[metric]))
        for row in rows
        if isinstance(row.get("step"), int) and isinstance(row.get(metric), int | float)
    ]


def default_metric(runs: Sequence[Path]) -> str:
    """The metric to sort by if none is given: the first of `DEFAULT_METRICS` that any run has."""
    names = {name for run in runs for name in last_metrics(run)}
    return next((name for name in DEFAULT_METRICS if name in names), DEFAULT_METRICS[-1])


def default_direction(metric: str) -> Direction:
    """Whether a metric is minimized or maximized, by its name."""
    return "minimize" if any(word in metric.rsplit("/", 1)[-1].lower() for word in SMALL_IS_GOOD) else "maximize"


def rank_rows(rows: Sequence[Row], direction: Direction) -> list[Row]:
    """Rows with the metric first, sorted, the best on top; then those without, in their order."""
    sign = 1 if direction == "minimize" else -1

    def key(row: Row) -> tuple[bool, float, int]:
        is_number = row.value is not None and not math.isnan(row.value)
        return not is_number, sign * row.value if is_number and row.value is not None else 0.0, row.point

    return sorted(rows, key=key)


def differing_paths(rows: Sequence[Row]) -> list[str]:
    """The paths in which rows differ, in the order in which the sweep names them."""
    paths = list(dict.fromkeys(path for row in rows for path in row.changes))
    if len(rows) == 1:
        return paths
    return [path for path in paths if len({render(row.changes.get(path)) for row in rows}) > 1]


def show_rows(rows: Sequence[Row], metric: str, console: Console) -> None:
    """Prints the rows as a table, at most as wide as the console."""
    columns = [Column("#", [str(row.point) for row in rows], right=True)]
    columns += [
        Column(
            path, [_shown(row, path) for row in rows], rank=1, least=min(12, len(path)), right=_is_numeric(rows, path)
        )
        for path in differing_paths(rows)
    ]
    columns.append(Column(metric, ["" if row.value is None else number(row.value) for row in rows], right=True))
    columns.append(Column("state", [row.state for row in rows]))
    columns.append(Column("step", ["" if row.step is None else str(row.step) for row in rows], rank=2, right=True))
    columns.append(Column("run", [row.run for row in rows], rank=3))
    show_table(columns, console)


def _shown(row: Row, path: str) -> str:
    value = row.changes.get(path)
    return "" if path not in row.changes else number(value) if isinstance(value, float) else render(value)


def _is_numeric(rows: Sequence[Row], path: str) -> bool:
    return all(isinstance(row.changes.get(path), int | float) for row in rows)
