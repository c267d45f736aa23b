"""The rewards of an objective: values of completions, their weighted sums, and what functions reported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from nnxdsl.config.objectives.reward import Reward
from nnxdsl.data.rewards.calls import Logged, Sampled, run_all
from nnxdsl.data.rewards.functions import COMPLETION, Opened, bound
from nnxdsl.data.user_code import source_of
from nnxdsl.errors import DataError, PlanError, Problem

T = TypeVar("T")
U = TypeVar("U")


class Scores(NamedTuple):
    """What rewards gave for completions, in plain JSON values.

    Attributes:
        values: Of each completion the value of each reward, not weighted; NaN where it does not apply.
        metrics: What functions gave `log_metric`, by name, in the order of functions and completions.
        extra: What they gave `log_extra`, by column, with an entry for each completion; None where there is nothing.
    """

    values: list[list[float]]
    metrics: dict[str, list[float]]
    extra: dict[str, list[Any]]


class Rewards:
    """The reward functions of an objective.

    Raises:
        PlanError: Functions that are not there or cannot be called, and settings without effect.
    """

    def __init__(self, rewards: Sequence[Reward], max_completion_length: int | None = None) -> None:
        self._rewards = _each(rewards, lambda one: bound(one, max_completion_length))
        self.names = tuple(one.name for one in rewards)
        self.weights = tuple(one.weight for one in rewards)

    def open(self) -> None:
        """Opens the functions that read something, see `Opened`.

        Raises:
            PlanError: What they read is not there.
        """
        functions = [one.function for one in self._rewards]
        _each(functions, lambda function: function.open() if isinstance(function, Opened) else None)

    def fingerprint(self) -> str:
        """sha256 hex over the sources of all functions, as far as they can be read."""
        digest = hashlib.sha256()
        for one in self._rewards:
            digest.update(f"{one.name}\n{source_of(one.function)}\n".encode())
        return digest.hexdigest()

    def check(self, columns: Sequence[Mapping[str, Any]], row_ids: Sequence[str]) -> None:
        """Raises DataError for the first row without a column that a function needs, or with one of a reserved name."""
        for name in dict.fromkeys([COMPLETION, *(name for one in self._rewards for name in sorted(one.reserved))]):
            for row_id, row in zip(row_ids, columns, strict=True):
                if name in row:
                    raise DataError(
                        f"{row_id}: the column '{name}' has the name of a parameter for completions; rename it "
                        f"with data.columns={{'{name}': ...}}"
                    )
        for one in self._rewards:
            for name in one.needs:
                for row_id, row in zip(row_ids, columns, strict=True):
                    if name not in row:
                        raise DataError(
                            f"{row_id}: reward '{one.name}' reads '{name}', which the row does not have; it "
                            f"has: {', '.join(row)}"
                        )

    def score(self, sampled: Sampled) -> Scores:
        """The value of each function for completions of prompts.

        Raises:
            RunError: A function raised, took longer than its time, or did not return a finite number or None for each
                completion; names row, function and value.
        """
        scores = run_all(self._rewards, sampled)
        values = [[values[index] for values, _ in scores] for index in range(len(sampled.texts))]
        metrics: dict[str, list[float]] = {}
        extra: dict[str, list[Any]] = {}
        for _, logs in scores:
            for log in logs:
                for name, value in log.metrics:
                    metrics.setdefault(name, []).append(value)
            extra |= _columns(logs)
        return Scores(values, metrics, extra)

    def totals(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The weighted sum of each completion over the rewards that apply; NaN where none does.

        Args:
            values: [completions, rewards]
        """
        each = np.atleast_2d(np.asarray(values, np.float64))
        applies = ~np.isnan(each)
        sums = np.where(applies, each, 0.0) @ np.asarray(self.weights)
        return np.where(applies.any(axis=1), sums, np.nan)


def _each(items: Sequence[T], act: Callable[[T], U]) -> list[U]:
    """What `act` returns for each; a PlanError with the problems of all, by their place among the rewards."""
    results, problems = list[U](), list[Problem]()
    for index, one in enumerate(items):
        try:
            results.append(act(one))
        except PlanError as error:
            problems += [problem.under(f"objective.rewards.{index}") for problem in error.problems]
    if problems:
        raise PlanError(problems, "rewards")
    return results


def _columns(logs: Sequence[Logged]) -> dict[str, list[Any]]:
    """The columns of all calls of a function, one call after another."""
    names = dict.fromkeys(name for log in logs for name in log.extra)
    return {name: [value for log in logs for value in log.extra.get(name, [None] * log.count)] for name in names}
