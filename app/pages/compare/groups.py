"""Groups of compared runs: one run each, runs that differ in their seed alone, or runs with one value of a field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from ...words import number
from .config import ABSENT, NAMES, brief, differing, paths
from .runs import Compared, Figure, direction, figure_of

SEEDS = "seeds"
"""Value of `group` in the query for runs that differ in `seed` alone; another one is the path of a field."""

SEED = "seed"
LONGEST = 60
"""Most characters of a group's name that are settings."""


@attrs.frozen
class Spread:
    """Mean of a figure over runs.

    Attributes:
        mean: Arithmetic mean.
        deviation: Sample standard deviation (divided by n - 1); None for one run.
        count: Number of runs, n.
    """

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
    """Runs that share a column and a colour.

    Attributes:
        name: Heading of its column.
        runs: Its runs, at least one.
        colour: Index of its colour: its position among the groups.
    """

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
        return {path: _joined([config.get(path, ABSENT) for config in configs]) for path in paths(configs)}

    def figures(self, name: str) -> list[Figure]:
        """Last and best value of a metric in each run; runs without it are left out."""
        found = [figure_of(run.columns.get(name), name) for run in self.runs]
        return [figure for figure in found if figure.last is not None]

    def last(self, name: str) -> Spread | None:
        """The last values of a metric; None without a finite one."""
        return spread_of([figure.last for figure in self.figures(name)])

    def best(self, name: str) -> Spread | None:
        """The best values of a metric; None without a finite one, or if neither low nor high values are better."""
        return spread_of([figure.best for figure in self.figures(name)]) if direction(name) else None


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Mean and sample standard deviation of the finite values; None without any."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return None
    return Spread(float(np.mean(finite)), float(np.std(finite, ddof=1)) if len(finite) > 1 else None, len(finite))


def grouped(runs: Sequence[Compared], by: str) -> list[Group]:
    """Groups runs, in the order of the first run of each group.

    Args:
        runs: The runs.
        by: `seeds`, the path of a field, or empty for a group of each run. Runs whose settings cannot be read are
            groups of their own.
    """
    groups: dict[object, list[Compared]] = {}
    for run in runs:
        groups.setdefault(_key(run, by), []).append(run)
    members = list(groups.values())
    names = _names(members, by)
    return [Group(name, group, colour) for colour, (name, group) in enumerate(zip(names, members, strict=True))]


def fields(runs: Sequence[Compared]) -> list[str]:
    """Paths of the settings in which runs differ: what they can be grouped by."""
    configs = [run.config for run in runs if run.config]
    return brief(configs, [path for path in differing(configs) if path not in (*NAMES, SEED)])


def averaged_over(groups: Sequence[Group], by: str) -> list[str]:
    """Settings in which runs within a group differ, except for names, seeds and the field that they are grouped by."""
    found: dict[str, None] = {}
    for group in groups:
        found |= dict.fromkeys(path for path in fields(group.runs) if path != by)
    return list(found)


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
    firsts = [group[0].config for group in groups]
    told = [by] if by and by != SEEDS else fields([group[0] for group in groups])
    ends = [path.rpartition(".")[2] for path in told]
    short = {path: end if ends.count(end) == 1 else path for path, end in zip(told, ends, strict=True)}
    names: list[str] = []
    for group, config in zip(groups, firsts, strict=True):
        words = ", ".join(f"{short[path]}={config.get(path, ABSENT)}" for path in told)
        many = f" ({len(group)} runs)" if len(group) > 1 else ""
        if by == SEEDS and many:
            many = f" ({len(group)} seeds)"
        if not by or not config or not words or len(words) > LONGEST:
            words = group[0].row.id
        names.append(f"{words}{many}")
    return [
        name if names.count(name) == 1 else f"{group[0].row.id}: {name}"
        for name, group in zip(names, groups, strict=True)
    ]


def _joined(values: Sequence[str]) -> str:
    return " | ".join(sorted(set(values)))


def baseline_of(groups: Sequence[Group], query: Mapping[str, str]) -> Group:
    """The group with the run that the query names as its baseline, or else the first."""
    base = query.get("base", "")
    return next((group for group in groups if any(run.row.id == base for run in group.runs)), groups[0])
