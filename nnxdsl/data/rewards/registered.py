"""Functions by name: registered with `@nnxdsl.reward(name)`, or imported as `module:function`; two are built in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nnxdsl.config.core.imports import find_named
from nnxdsl.config.objectives.reward import Function, functions, reward
from nnxdsl.data.rewards.functions import function_of, refused


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
    try:
        function = find_named(reward.name, functions, "reward", "function")
    except ValueError as error:
        raise refused("name", str(error)) from error
    if not callable(function):
        raise refused("name", f"'{reward.name}' is no function")
    return function
