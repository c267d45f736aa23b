"""Compared runs as plain values: their metrics and the best value of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from nnxdsl.errors import NnxdslError
from nnxdsl.storage.jsonl import read_json

from ...state import Site
from ...store.growing import REMEMBERED
from ...store.index import Row
from ...store.run_filter import is_found
from ...store.run_paths import run_path
from ...store.series import Columns
from ..run.charts import TOGETHER
from .config import flat

LEAST, MOST = 2, 6
MOST_FOUND = REMEMBERED
"""Most runs of a filter: as many as the cache of metrics holds, which the page reads every few seconds."""

LOWER = ("loss", "eval/loss")
"""Metrics for which lower is better."""

HIGHER = ("accurac", "margins", "tokens/s")
"""Parts of metric names for which higher is better."""


@attrs.frozen
class Compared:
    """One of the compared runs.

    Attributes:
        row: Its row in the list of runs.
        columns: Its metrics by name.
        config: Its experiment, flattened; empty if it cannot be read.
    """

    row: Row
    columns: Mapping[str, Columns]
    config: Mapping[str, str]


def compared(site: Site, query: Mapping[str, str]) -> tuple[list[Compared], list[str]]:
    """Returns the runs of the query, those of `ids` first, and those ids that there are no runs of."""
    named = {run: site.index.row(run) for run in ids_of(query)}
    missing_ids = [run for run, row in named.items() if row is None]
    rows = {row.id: row for row in (*named.values(), *filtered(site, query)[:MOST_FOUND]) if row is not None}
    found: list[Compared] = []
    for row in rows.values():
        try:
            directory = run_path(site.settings.home, row.id)
            config = flat(read_json(directory / "experiment.json"))
            columns = dict(site.series.of(directory / "metrics.jsonl").columns)
        except NnxdslError:
            config, columns = {}, {}
        found.append(Compared(row, columns, config))
    return found, missing_ids


def ids_of(query: Mapping[str, str]) -> list[str]:
    """Ids that the query names one by one."""
    return list(dict.fromkeys(one for one in query.get("ids", "").split(",") if one))[:MOST]


def filtered(site: Site, query: Mapping[str, str]) -> list[Row]:
    """Runs that the query's filter finds, newest first; none without a filter."""
    wanted = query.get("filter", "")
    return [row for row in site.index.rows() if wanted.strip() and is_found(row, site.tags.of(row.id), wanted)]


class Figure(NamedTuple):
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
    steps, values = columns.arrays() if columns is not None else (np.zeros(0), np.zeros(0))
    if not np.isfinite(values).any():
        return Figure()
    last, way = float(values[-1]), direction(name)
    if way == 0:
        return Figure(last)
    at = int(np.nanargmax(np.where(np.isfinite(values), way * values, np.nan)))
    return Figure(last, float(values[at]), float(steps[at]))


def depends_on_objective(name: str) -> bool:
    """Whether a metric is in units of the objective: losses, and rewards, which are scaled by beta."""
    return "loss" in name or ("rewards/" in name and "accurac" not in name)


def direction(name: str) -> int:
    """-1 if lower is better, 1 if higher is better, else 0."""
    if name in LOWER:
        return -1
    return 1 if any(part in name for part in HIGHER) else 0
