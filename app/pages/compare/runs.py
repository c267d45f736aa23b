"""Compared runs as plain values: their metrics and the best value of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from nnxdsl.errors import NnxdslError
from nnxdsl.storage.jsonl import read_json

from ...state import Site
from ...store.index import Row
from ...store.run_paths import run_path
from ...store.series import Columns
from ..run.charts import TOGETHER
from .config import flat

LEAST, MOST = 2, 6

LOWER = ("loss", "eval/loss")
"""Metrics for which lower is better."""

HIGHER = ("accurac", "margins", "tokens/s")
"""Parts of metric names for which higher is better."""


@attrs.frozen
class Compared:
    """One of the compared runs.

    Attributes:
        row: Its row in the list of runs.
        colour: Index of its colour: its position among the runs in the URL.
        columns: Its metrics by name.
        config: Its experiment, flattened; empty if it cannot be read.
    """

    row: Row
    colour: int
    columns: Mapping[str, Columns]
    config: Mapping[str, str]


def compared(site: Site, query: Mapping[str, str]) -> tuple[list[Compared], list[str]]:
    """Returns the runs of the query in its order, and those ids that there are no runs of."""
    ids = list(dict.fromkeys(one for one in query.get("ids", "").split(",") if one))[:MOST]
    found: list[Compared] = []
    missing_ids: list[str] = []
    for run in ids:
        row = site.index.row(run)
        if row is None:
            missing_ids.append(run)
            continue
        try:
            directory = run_path(site.settings.home, row.id)
            config = flat(read_json(directory / "experiment.json"))
            columns = dict(site.series.of(directory / "metrics.jsonl").columns)
        except NnxdslError:
            config, columns = {}, {}
        found.append(Compared(row, len(found), columns, config))
    return found, missing_ids


@attrs.frozen
class Figure:
    """A metric of one run: its last value, and its best value with the step; None without values."""

    last: float | None = None
    best: float | None = None
    step: float | None = None


def names_of(runs: Sequence[Compared]) -> list[str]:
    """Metrics to list: those with charts first, each held-out metric after its training counterpart."""
    columns = {name for run in runs for name in run.columns}
    first = [name for _, names in TOGETHER for name in names if name in columns]
    rest = sorted(columns - set(first) - {"num_tokens", "pairs/s", "samples/s"})
    return [*first, *rest, *(["num_tokens"] if "num_tokens" in columns else [])]


def figure_of(columns: Columns | None, name: str) -> Figure:
    """Last and best value of a column; a non-finite last value is kept."""
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
    """Whether a metric is in units of the objective: losses, and rewards, which are scaled by beta."""
    return "loss" in name or ("rewards/" in name and "accurac" not in name)


def direction(name: str) -> int:
    """-1 if lower is better, 1 if higher is better, else 0."""
    if name in LOWER:
        return -1
    return 1 if any(part in name for part in HIGHER) else 0
