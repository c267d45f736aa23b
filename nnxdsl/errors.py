"""All exceptions: their messages give the place, the problem and a fix; and "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import attrs


@attrs.frozen
class Problem:
    """One problem: its dotted path (empty for the object itself) and its message."""

    path: str
    message: str

    def under(self, prefix: str) -> Problem:
        """The same problem with `prefix` before its path."""
        return Problem(join(prefix, self.path), self.message)

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class NnxdslError(Exception):
    """Base of every error that nnxdsl raises on purpose."""


class _ProblemsError(NnxdslError):
    def __init__(self, problems: Iterable[Problem], where: str = "") -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.where = where
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        heading = f"{count} in {where}" if where else count
        super().__init__("\n".join([heading, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[_ProblemsError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.where)


class SpecError(_ProblemsError):
    """An invalid experiment, or an invalid part of one, with all its problems."""


class PlanError(_ProblemsError):
    """A valid experiment whose shapes, files or devices do not fit, with all its problems."""


class DataError(NnxdslError):
    """A row, a file or a tokenizer that cannot be read: `file:line: what is wrong`."""


class WeightsError(NnxdslError):
    """Weights that are missing, damaged or of another shape: the parameter, the file, what was expected."""


class NotRegisteredError(NnxdslError, NotImplementedError):
    """A third-party class that is not registered; the message shows how to register it."""


class RunError(NnxdslError):
    """A run that cannot start or resume: its directory, the reason, and what to do."""


def join(prefix: str, path: str) -> str:
    """Joins two dotted paths; either may be empty."""
    return f"{prefix}.{path}" if prefix and path else prefix or path


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'beta'?` for the nearest candidate; empty where none is near."""
    near = difflib.get_close_matches(name, sorted(set(candidates)), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def suggest(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'beta'?` for the nearest candidate, else the candidates themselves if they are few."""
    names = sorted(set(candidates))
    listed = f"; there are: {', '.join(names)}" if 0 < len(names) <= 20 else ""
    return nearest(name, names) or listed
