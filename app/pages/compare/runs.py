"""Compared runs and groups of them: their metrics, the best value of each, and what groups are named by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from nnxdsl.errors import NnxdslError
from nnxdsl.storage.jsonl import read_json

from ...components.metrics import GROUPED, NOT_ALONE
from ...formatting import number
from ...state import Site
from ...store.growing import REMEMBERED
from ...store.index import Row
from ...store.run_filter import is_found
from ...store.run_paths import run_path
from ...store.series import Columns
from .config import ABSENT, NAMES, brief, differing, flat, paths

LEAST, MOST = 2, 6
MOST_FOUND = REMEMBERED
"""Most runs of a filter: as many as the cache of metrics holds, which the page reads every few seconds."""

LOWER = ("loss", "eval/loss")  # metrics for which lower is better
HIGHER = ("accurac", "margins", "tokens/s")  # parts of metric names for which higher is better
SEEDS = "seeds"
"""Value of `group` in the query for runs that differ in `seed` alone; another one is the path of a field."""
SEED = "seed"
LONGEST = 60  # most characters of a group's name that are settings


@attrs.frozen
class Compared:
    """A compared run: its row in the list, its metrics, and its experiment, empty if that is unreadable."""

    row: Row
    columns: Mapping[str, Columns]
    config: Mapping[str, str]


def compared(site: Site, query: Mapping[str, str]) -> tuple[list[Compared], list[str]]:
    """Returns the runs of the query, those of `ids` first, and those ids that there are no runs of."""
    named = {run: site.index.row(run) for run in ids_of(query)}
    missing_ids = [run for run, row in named.items() if row is None]
    rows = {row.id: row for row in (*named.values(), *filtered(site, query)[:MOST_FOUND]) if row is not None}
    runs: list[Compared] = []
    for row in rows.values():
        try:
            directory = run_path(site.settings.home, row.id)
            config = flat(read_json(directory / "experiment.json"))
            columns = dict(site.series.of(directory / "metrics.jsonl").columns)
        except NnxdslError:
            config, columns = {}, {}
        runs.append(Compared(row, columns, config))
    return runs, missing_ids


def ids_of(query: Mapping[str, str]) -> list[str]:
    """Ids that the query names one by one."""
    return list(dict.fromkeys(one for one in query.get("ids", "").split(",") if one))[:MOST]


def filtered(site: Site, query: Mapping[str, str]) -> list[Row]:
    """Runs that the query's filter finds, newest first; none without a filter."""
    wanted = query.get("filter", "")
    tags = site.tags.by_run()
    return [row for row in site.index.rows() if wanted.strip() and is_found(row, tags.get(row.id, ()), wanted)]


class Figure(NamedTuple):
    """A metric of one run: its last value, and its best value with the step; None without values."""

    last: float | None = None
    best: float | None = None
    step: float | None = None


def names_of(runs: Sequence[Compared]) -> list[str]:
    """Metrics to list: those with charts first, each held-out metric after its training counterpart."""
    columns = {name for run in runs for name in run.columns}
    first = [one for names in GROUPED.values() for name in names for one in (name, f"eval/{name}") if one in columns]
    rest = sorted(columns - {*first} - NOT_ALONE)
    return [*first, *rest, *(["num_tokens"] if "num_tokens" in columns else [])]


def figure_of(columns: Columns | None, name: str) -> Figure:
    """Last and best value of a column; a non-finite last value is kept."""
    steps, values = columns.arrays() if columns is not None else (np.zeros(0), np.zeros(0))
    if not np.isfinite(values).any():
        return Figure()
    last, way = float(values[-1]), direction(name)
    if way == 0:
        return Figure(last)
    index = int(np.nanargmax(np.where(np.isfinite(values), way * values, np.nan)))
    return Figure(last, float(values[index]), float(steps[index]))


def direction(name: str) -> int:
    """-1 if lower is better, 1 if higher is better, else 0."""
    if name in LOWER:
        return -1
    return 1 if any(part in name for part in HIGHER) else 0


@attrs.frozen
class Spread:
    """Mean of a figure over n runs, and its sample standard deviation (divided by n - 1), which one run has not."""

    mean: float
    deviation: float | None
    count: int

    def __str__(self) -> str:
        """Mean, standard deviation and number of runs.

        >>> str(Spread(0.345678, 0.0123, 3)), str(Spread(0.5, None, 1))
        ('0.3457 ± 0.0123 (3)', '0.5 (1)')
        """
        around = "" if self.deviation is None else f" ± {number(self.deviation)}"
        return f"{number(self.mean)}{around} ({self.count})"


@attrs.frozen
class Group:
    """At least one run: a column, and a colour by its position among the groups."""

    name: str
    runs: Sequence[Compared]
    colour: int

    @property
    def is_one(self) -> bool:
        """Whether it has one run alone."""
        return len(self.runs) == 1

    @property
    def config(self) -> dict[str, str]:
        """Settings of its runs, flattened; where they differ, their values."""
        configs = [run.config for run in self.runs if run.config]
        return {path: " | ".join(sorted({one.get(path, ABSENT) for one in configs})) for path in paths(configs)}

    def each(self, name: str, what: str) -> list[float]:
        """The "last" or the "best" value of a metric, or the "step" of the best, in each run that has it."""
        values = [getattr(figure_of(run.columns.get(name), name), what) for run in self.runs]
        return [value for value in values if value is not None]

    def value(self, name: str, what: str) -> Spread | float | None:
        """The same of a run alone, and of several runs their mean; None if none has it."""
        values = self.each(name, what)
        return next(iter(values), None) if self.is_one else spread_of(values)


def spread_of(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation of the finite values; None without any."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return Spread(float(np.mean(finite)), float(np.std(finite, ddof=1)) if len(finite) > 1 else None, len(finite))


def grouped(runs: Sequence[Compared], by: str) -> list[Group]:
    """Groups runs by `seeds` or by the path of a field; else, or without readable settings, each is alone.

    Groups are in the order of their first runs.
    """
    groups: dict[object, list[Compared]] = {}
    for run in runs:
        groups.setdefault(_key(run, by), []).append(run)
    names = _names([*groups.values()], by)
    return [Group(name, group, place) for place, (name, group) in enumerate(zip(names, groups.values(), strict=True))]


def fields(runs: Sequence[Compared]) -> list[str]:
    """Paths of the settings in which runs differ: what they can be grouped by."""
    configs = [run.config for run in runs if run.config]
    return brief(configs, [path for path in differing(configs) if path not in (*NAMES, SEED)])


def averaged_over(groups: Sequence[Group], by: str) -> list[str]:
    """Settings in which runs within a group differ, except for names, seeds and the field that they are grouped by."""
    return list(dict.fromkeys(path for group in groups for path in fields(group.runs) if path != by))


def _key(run: Compared, by: str) -> object:
    if not by or not run.config:
        return run.row.id
    if by == SEEDS:
        return frozenset((path, text) for path, text in run.config.items() if path not in (*NAMES, SEED))
    return (run.config.get(by, ABSENT),)


def _names(groups: Sequence[Sequence[Compared]], by: str) -> list[str]:
    """Names of groups, all different: the id of a run alone; else the settings that tell groups apart, or the first id.

    A field is named by its last part if no other one ends with it.
    """
    firsts = [group[0] for group in groups]
    shown = [by] if by and by != SEEDS else fields(firsts)
    ends = [path.rpartition(".")[2] for path in shown]
    short = {path: end if ends.count(end) == 1 else path for path, end in zip(shown, ends, strict=True)}
    names: list[str] = []
    for group, first in zip(groups, firsts, strict=True):
        text = ", ".join(f"{short[path]}={first.config.get(path, ABSENT)}" for path in shown)
        is_named = by and first.config and 0 < len(text) <= LONGEST
        many = f" ({len(group)} {'seeds' if by == SEEDS else 'runs'})" if len(group) > 1 else ""
        names.append(f"{text if is_named else first.row.id}{many}")
    return [
        name if names.count(name) == 1 else f"{first.row.id}: {name}" for name, first in zip(names, firsts, strict=True)
    ]


def baseline_of(groups: Sequence[Group], query: Mapping[str, str]) -> Group | None:
    """The group with the run that the query names as its baseline, or else the first; None without groups."""
    named = [group for group in groups if any(run.row.id == query.get("base") for run in group.runs)]
    return next(iter([*named, *groups]), None)
