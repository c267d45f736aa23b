"""Functions by name: registered with `@nnxdsl.reward(name)`, or imported as `module:function`; two are built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnxdsl.config.core.imports import import_name
from nnxdsl.config.objectives.reward import Function, functions, reward
from nnxdsl.data.rewards.functions import function_of, refused
from nnxdsl.errors import suggest


@reward("exact_answer")
def exact_answer(completion: str, answer: str) -> float:
    """1 if the completion equals the row's `answer`, blanks around both stripped, else 0."""
    return float(completion.strip() == answer.strip())


@reward("contains_answer")
def contains_answer(completion: str, answer: str) -> float:
    """1 if the completion contains the row's `answer`, case-insensitively, else 0."""
    return float(answer.strip().casefold() in completion.casefold())


@function_of.register(Function)
def _by_name(reward: Function, max_completion_length: int | None) -> Callable[..., Any]:
    function = functions.get(reward.name)
    if function is None and ":" in reward.name:
        return _imported(reward.name)
    if function is None:
        raise refused(
            "name",
            f"no reward '{reward.name}' is registered{suggest(reward.name, functions)}; import the file that has "
            f"@nnxdsl.reward('{reward.name}'), or write 'module:function'",
        )
    return function


def _imported(name: str) -> Callable[..., Any]:
    try:
        function = import_name(name)
    except ValueError as error:
        raise refused("name", str(error)) from error
    if not callable(function):
        raise refused("name", f"'{name}' is no function")
    return function
