"""Reward functions by name: found, checked against the rows that they read, and called, with errors that name the row.

Two are here, under `contains_answer` and `exact_answer`; others are registered with `@nnxdsl.reward(name)`.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs

from nnxdsl.config.core.imports import import_name
from nnxdsl.config.objectives.reward import Function, Reward, functions, reward
from nnxdsl.errors import DataError, PlanError, Problem, RunError, suggest

SHOWN = 80
"""Characters of an answer that a message shows."""


@reward("exact_answer")
def exact_answer(completion: str, answer: str) -> float:
    """1 where the answer is the row's `answer` and nothing else, blanks around it left out, else 0."""
    return float(completion.strip() == answer.strip())


@reward("contains_answer")
def contains_answer(completion: str, answer: str) -> float:
    """1 where the row's `answer` stands somewhere in the answer, in lower or upper case, else 0."""
    return float(answer.strip().casefold() in completion.casefold())


@attrs.frozen
class _Found:
    """A reward with its function.

    Attributes:
        reward: As asked for.
        function: The function.
        reads: Columns that it has parameters for; None for all.
        needs: Of these, the ones without a default.
    """

    reward: Reward
    function: Function
    reads: frozenset[str] | None
    needs: tuple[str, ...]


class Rewards:
    """The rewards of an objective.

    Args:
        asked: Which, with their weights.

    Raises:
        PlanError: A name that nothing is registered under, or a function that takes no answer; all at once.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        problems: list[Problem] = []
        self._found: list[_Found] = []
        for index, one in enumerate(rewards):
            try:
                self._found.append(_found(one))
            except LookupError as error:
                problems.append(Problem(f"objective.rewards.{index}.name", str(error.args[0])))
        if problems:
            raise PlanError(problems, "rewards")
        self.names = tuple(one.name for one in rewards)
        self.weights = tuple(one.weight for one in rewards)

    def fingerprint(self) -> str:
        """sha256 hex over the source of all functions, as far as it can be read: another source is another reward."""
        digest = hashlib.sha256()
        for found in self._found:
            try:
                source = inspect.getsource(found.function)
            except (OSError, TypeError):  # written at a prompt, or no function of Python's
                source = repr(getattr(found.function, "__qualname__", ""))
            digest.update(f"{found.reward.name}\n{source}\n".encode())
        return digest.hexdigest()

    def check(self, columns: Sequence[Mapping[str, Any]], row_ids: Sequence[str]) -> None:
        """Refuses rows that lack a column which a function cannot do without.

        Raises:
            DataError: Names the function, the column and the first such row.
        """
        for found in self._found:
            for name in found.needs:
                for row_id, row in zip(row_ids, columns, strict=True):
                    if name not in row:
                        raise DataError(
                            f"{row_id}: reward '{found.reward.name}' reads '{name}', which the row does not have; it "
                            f"has: {', '.join(row)}"
                        )

    def of(self, completion: str, row: Mapping[str, Any], row_id: str) -> list[float]:
        """What an answer is worth to each function, not weighted.

        Args:
            completion: The answer's text.
            row: The columns of its prompt's row, `prompt` among them.
            row_id: `file:line` of the row.

        Raises:
            RunError: A function raised, or gave something that is no finite number; names row, function and value.
        """
        return [_value(found, completion, row, row_id) for found in self._found]


def _value(found: _Found, completion: str, row: Mapping[str, Any], row_id: str) -> float:
    read = {name: value for name, value in row.items() if found.reads is None or name in found.reads}
    where = f"{row_id}: reward '{found.reward.name}'"
    shown = completion if len(completion) <= SHOWN else completion[:SHOWN] + "..."
    try:
        value: Any = found.function(completion, **read)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise RunError(f"{where} failed with {what}; the answer was {shown!r}") from error
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RunError(f"{where} gave {value!r}, which is no finite number; the answer was {shown!r}")
    return float(value)


def _found(reward: Reward) -> _Found:
    function = functions.get(reward.name)
    if function is None and ":" in reward.name:
        function = _imported(reward.name)
    if function is None:
        raise LookupError(
            f"no reward '{reward.name}' is registered{suggest(reward.name, functions)}; import the file that has "
            f"@nnxdsl.reward('{reward.name}'), or write 'module:function'"
        )
    parameters = list(inspect.signature(function).parameters.values())
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not by_place and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise LookupError(f"the function of '{reward.name}' takes no answer: its first parameter must be its text")
    rest = [one for one in parameters if one not in by_place[:1] and one.kind is not one.VAR_POSITIONAL]
    named = [one for one in rest if one.kind is not one.VAR_KEYWORD]
    takes_all = len(named) < len(rest)
    needs = tuple(one.name for one in named if one.default is one.empty)
    return _Found(reward, function, None if takes_all else frozenset(one.name for one in named), needs)


def _imported(name: str) -> Function:
    try:
        found = import_name(name)
    except ValueError as error:
        raise LookupError(str(error)) from error
    if not callable(found):
        raise LookupError(f"'{name}' is no function")
    return cast("Function", found)
