"""Groups of compared runs: one run each, runs that differ in their seed alone, or runs with one value of a field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from ...words import number
from .config import ABSENT, NAMES, brief, differing, paths
from .runs import Compared, figure_of

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
        return {path: " | ".join(sorted({one.get(path, ABSENT) for one in configs})) for path in paths(configs)}

    def each(self, name: str, what: str) -> list[float]:
        """The "last" or the "best" value of a metric, or the "step" of the best, in each run that has it."""
        found = [getattr(figure_of(run.columns.get(name), name), what) for run in self.runs]
        return [value for value in found if value is not None]

    def value(self, name: str, what: str) -> Spread | float | None:
        """The same of a run alone, and of several runs their mean; None if none has it."""
        found = self.each(name, what)
        return next(iter(found), None) if self.is_one else spread_of(found)


def spread_of(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation of the finite values; None without any."""
    finite = [value for value in values if math.isfinite(value)]
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
    told = [by] if by and by != SEEDS else fields(firsts)
    ends = [path.rpartition(".")[2] for path in told]
    short = {path: end if ends.count(end) == 1 else path for path, end in zip(told, ends, strict=True)}
    names: list[str] = []
    for group, first in zip(groups, firsts, strict=True):
        words = ", ".join(f"{short[path]}={first.config.get(path, ABSENT)}" for path in told)
        is_named = by and first.config and 0 < len(words) <= LONGEST
        many = f" ({len(group)} {'seeds' if by == SEEDS else 'runs'})" if len(group) > 1 else ""
        names.append(f"{words if is_named else first.row.id}{many}")
    return [
        name if names.count(name) == 1 else f"{first.row.id}: {name}" for name, first in zip(names, firsts, strict=True)
    ]


def baseline_of(groups: Sequence[Group], query: Mapping[str, str]) -> Group | None:
    """The group with the run that the query names as its baseline, or else the first; None without groups."""
    named = [group for group in groups if any(run.row.id == query.get("base") for run in group.runs)]
    return next(iter([*named, *groups]), None)
