"""Reward functions by name: looked up, checked against the columns that they read, and called.

`contains_answer` and `exact_answer` are built in; others are registered with `@nnxdsl.reward(name)`.
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

COMPLETION = "completion"
"""Parameter for the completion."""
ROW_NAMES = ("prompt", "prompts")
"""Parameters for the row's prompt, never the completion."""
SHOWN = 80
"""Characters of a completion in messages."""


@reward("exact_answer")
def exact_answer(completion: str, answer: str) -> float:
    """1 if the completion equals the row's `answer`, blanks around both stripped, else 0."""
    return float(completion.strip() == answer.strip())


@reward("contains_answer")
def contains_answer(completion: str, answer: str) -> float:
    """1 if the completion contains the row's `answer`, case-insensitively, else 0."""
    return float(answer.strip().casefold() in completion.casefold())


@attrs.frozen
class _BoundReward:
    """A reward with its function.

    Attributes:
        reward: Its config.
        function: The function.
        reads: Columns that it has parameters for; None for all.
        needs: Those without a default.
        parameter: The parameter for the completion: `completion`, at any position, else the first.
    """

    reward: Reward
    function: Function
    reads: frozenset[str] | None
    needs: tuple[str, ...]
    parameter: str


class Rewards:
    """The reward functions of an objective.

    Raises:
        PlanError: Names that are not registered, and functions without a parameter for the completion.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        problems: list[Problem] = []
        self._rewards: list[_BoundReward] = []
        for index, one in enumerate(rewards):
            try:
                self._rewards.append(_resolve(one))
            except LookupError as error:
                problems.append(Problem(f"objective.rewards.{index}.name", str(error.args[0])))
        if problems:
            raise PlanError(problems, "rewards")
        self.names = tuple(one.name for one in rewards)
        self.weights = tuple(one.weight for one in rewards)

    def fingerprint(self) -> str:
        """sha256 hex over the sources of all functions, as far as they can be read."""
        digest = hashlib.sha256()
        for one in self._rewards:
            try:
                source = inspect.getsource(one.function)
            except (OSError, TypeError):  # defined interactively, or not in Python
                source = repr(getattr(one.function, "__qualname__", ""))
            digest.update(f"{one.reward.name}\n{source}\n".encode())
        return digest.hexdigest()

    def check(self, columns: Sequence[Mapping[str, Any]], row_ids: Sequence[str]) -> None:
        """Raises DataError for the first row without a column that a function needs, or with one of a reserved name."""
        for name in dict.fromkeys([COMPLETION, *(one.parameter for one in self._rewards)]):
            for row_id, row in zip(row_ids, columns, strict=True):
                if name in row:
                    raise DataError(
                        f"{row_id}: the column '{name}' has the name of the completion's parameter; rename it "
                        f"with data.columns={{'{name}': ...}}"
                    )
        for one in self._rewards:
            for name in one.needs:
                for row_id, row in zip(row_ids, columns, strict=True):
                    if name not in row:
                        raise DataError(
                            f"{row_id}: reward '{one.reward.name}' reads '{name}', which the row does not have; it "
                            f"has: {', '.join(row)}"
                        )

    def score(self, completion: str, row: Mapping[str, Any], row_id: str) -> list[float]:
        """The value of each function, not weighted, for a completion of the prompt in a row with its columns.

        Raises:
            RunError: A function raised or did not return a finite number; names row, function and value.
        """
        return [_value(one, completion, row, row_id) for one in self._rewards]


def _value(bound: _BoundReward, completion: str, row: Mapping[str, Any], row_id: str) -> float:
    read = {name: value for name, value in row.items() if bound.reads is None or name in bound.reads}
    name = f"{row_id}: reward '{bound.reward.name}'"
    shown = completion if len(completion) <= SHOWN else completion[:SHOWN] + "..."
    try:
        if bound.parameter == COMPLETION:
            value: Any = bound.function(**read, **{COMPLETION: completion})
        else:
            value = bound.function(completion, **read)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise RunError(f"{name} failed with {what}; the completion was {shown!r}") from error
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        hint = " (expected one number for one completion)" if isinstance(value, list | tuple) else ""
        raise RunError(f"{name} returned {value!r}, not a finite number{hint}; the completion was {shown!r}")
    return float(value)


def _resolve(reward: Reward) -> _BoundReward:
    function = functions.get(reward.name)
    if function is None and ":" in reward.name:
        function = _imported(reward.name)
    if function is None:
        raise LookupError(
            f"no reward '{reward.name}' is registered{suggest(reward.name, functions)}; import the file that has "
            f"@nnxdsl.reward('{reward.name}'), or write 'module:function'"
        )
    parameters = list(inspect.signature(function).parameters.values())
    _refuse_other_forms(reward.name, function, parameters)
    by_name = any(one.name == COMPLETION and one.kind is not one.POSITIONAL_ONLY for one in parameters)
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not by_name and not by_place and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise LookupError(f"the function of '{reward.name}' takes no completion: its first parameter must be the text")
    if not by_name and by_place and by_place[0].name in ROW_NAMES:
        raise LookupError(
            f"the function of '{reward.name}' has '{by_place[0].name}' as its first parameter and no '{COMPLETION}'; "
            f"name the parameter for the completion '{COMPLETION}'"
        )
    taken = [one for one in parameters if one.name == COMPLETION] if by_name else by_place[:1]
    parameter = next((one.name for one in taken if one.kind is not one.POSITIONAL_ONLY), "")
    rest = [one for one in parameters if one not in taken and one.kind is not one.VAR_POSITIONAL]
    named = [one for one in rest if one.kind is not one.VAR_KEYWORD]
    takes_all = len(named) < len(rest)
    needs = tuple(one.name for one in named if one.default is one.empty)
    reads = None if takes_all else frozenset(one.name for one in named)
    return _BoundReward(reward, function, reads, needs, parameter)


def _refuse_other_forms(name: str, function: Function, parameters: Sequence[inspect.Parameter]) -> None:
    """Refuses a coroutine function, and one of whole batches, as TRL calls them."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if is_async:
        raise LookupError(
            f"the function of '{name}' is async; a reward function must be synchronous: write it with def"
        )
    if any(one.name == "completions" for one in parameters):
        raise LookupError(
            f"the function of '{name}' reads 'completions', a batch, as TRL's reward functions do; write a function "
            f"that gets one completion as '{COMPLETION}' and returns one number"
        )


def _imported(name: str) -> Function:
    try:
        function = import_name(name)
    except ValueError as error:
        raise LookupError(str(error)) from error
    if not callable(function):
        raise LookupError(f"'{name}' is no function")
    return cast("Function", function)
