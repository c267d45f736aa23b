"""How the function of a reward is called: for one completion or for all at once, and with which arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from nnxdsl.config.core.base import declared
from nnxdsl.config.objectives.reward import Reward
from nnxdsl.errors import PlanError, Problem

COMPLETION = "completion"
"""Parameter for the text of one completion."""
BATCH = ("prompts", "completions", "completion_ids")
"""Parameters for what a function of all completions gets beside the columns, as TRL's functions do."""
LOGS = ("log_metric", "log_extra")
"""Parameters for functions that report, given to functions that have them."""


@runtime_checkable
class Opened(Protocol):
    """A function that reads something, such as a model, before the first step."""

    def open(self) -> None:
        """Reads it.

        Raises:
            PlanError: It is not there; paths from the reward.
        """
        ...


@functools.singledispatch
def function_of(reward: Reward, max_completion_length: int | None) -> Callable[..., Any]:
    """The function that computes a reward; other packages register theirs with `@function_of.register(MyReward)`.

    Where the class has a field `timeout` or `max_concurrency`, it acts as that of `Reward.Function`.

    Args:
        reward: The reward.
        max_completion_length: Most tokens of a completion; None if it is not known.

    Returns:
        A function of one completion or of all at once, as `nnxdsl.reward` describes both. One with a method `open`
        (see `Opened`) is opened after the runs that the experiment starts from, and before its first step.

    Raises:
        PlanError: There is none, or a setting has no effect; paths from the reward.
    """
    kind = type(reward).__qualname__
    raise refused("", f"nothing computes {kind}; add @nnxdsl.data.rewards.function_of.register({kind})")


def refused(path: str, message: str) -> PlanError:
    """The error for a setting of a reward."""
    return PlanError([Problem(path, message)], "reward")


@attrs.frozen
class BoundReward:
    """A reward with its function.

    Attributes:
        name: The reward's.
        function: The function.
        timeout: Seconds that one call may take; None for no limit.
        max_concurrency: Calls at one time, if it is `async`.
        is_async: Whether a call has to be awaited.
        is_batch: Whether one call is for all completions.
        parameter: The parameter for the text of one completion: `completion`, at any position, else the first; empty
            if that has no name.
        arguments: Which of `BATCH` and `LOGS` it gets.
        reads: Columns that it has parameters for; None for all.
        needs: Those without a default.
    """

    name: str
    function: Callable[..., Any]
    timeout: float | None
    max_concurrency: int
    is_async: bool
    is_batch: bool
    parameter: str
    arguments: frozenset[str]
    reads: frozenset[str] | None
    needs: tuple[str, ...]

    @property
    def reserved(self) -> frozenset[str]:
        """Names that a column cannot have."""
        return frozenset({COMPLETION, self.parameter, *self.arguments} - {""})

    def columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Those columns of a row that it reads."""
        return {
            name: value
            for name, value in row.items()
            if (self.reads is None or name in self.reads) and not (self.is_batch and name == "prompt")
        }


def bound(reward: Reward, max_completion_length: int | None) -> BoundReward:
    """A reward with its function, and what that asks for.

    Raises:
        PlanError: It has no function, or one that cannot be called; paths from the reward.
    """
    function = function_of(reward, max_completion_length)
    parameters = _parameters(reward.name, function)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    is_batch = _is_batch(parameters)
    taken = [] if is_batch else _completion(reward.name, parameters)
    rest = [one for one in parameters if one not in taken and one.kind is not one.VAR_POSITIONAL]
    named = [one for one in rest if one.kind is not one.VAR_KEYWORD]
    takes_all = len(named) < len(rest)
    names = {one.name for one in named}
    if is_batch and "prompt" in names:
        raise refused("name", f"the function of '{reward.name}' gets all prompts at once; name the parameter 'prompts'")
    arguments = names.intersection((*BATCH, *LOGS) if is_batch else ("completion_ids", *LOGS))
    if is_batch and takes_all:
        arguments |= {*BATCH}
    _check_concurrency(reward, is_async and not is_batch)
    return BoundReward(
        name=reward.name,
        function=function,
        timeout=reward.timeout,
        max_concurrency=reward.max_concurrency,
        is_async=is_async,
        is_batch=is_batch,
        parameter=next((one.name for one in taken if one.kind is not one.POSITIONAL_ONLY), ""),
        arguments=frozenset(arguments),
        reads=None if takes_all else frozenset(names - arguments),
        needs=tuple(one.name for one in named if one.default is one.empty and one.name not in arguments),
    )


def _parameters(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:  # of a function in C
        raise refused("name", f"the parameters of '{name}' cannot be read: {error}; call it in one of yours") from error


def _is_batch(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether it has the parameters of TRL's functions: lists, named in the plural."""
    names = [one.name for one in parameters]
    return COMPLETION not in names and ("completions" in names or "prompts" in names or names[:1] == ["completion_ids"])


def _completion(name: str, parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameter for the text of one completion; none if it is one of `*args`."""
    if by_name := [one for one in parameters if one.name == COMPLETION and one.kind is not one.POSITIONAL_ONLY]:
        return by_name
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not by_place and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise refused("name", f"the function of '{name}' takes no completion: its first parameter must be the text")
    if by_place and by_place[0].name == "prompt":
        message = f"the function of '{name}' has 'prompt' as its first parameter and no '{COMPLETION}'; name the "
        raise refused("name", f"{message}parameter for the completion '{COMPLETION}'")
    return by_place[:1]


def _check_concurrency(reward: Reward, acts: bool) -> None:
    field = declared(type(reward)).get("max_concurrency")
    if field is not None and not acts and reward.max_concurrency != field.default:
        message = f"has no effect: the function of '{reward.name}' is not an async function of one completion"
        raise refused("max_concurrency", message)
