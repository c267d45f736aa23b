"""Environments: Python classes under a registered name that answer the completions of an episode, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, function_name, positive

EnvironmentT = TypeVar("EnvironmentT", bound=Callable[..., Any])

environments: dict[str, Callable[..., Any]] = {}
"""Every registered class by its name."""


@attrs.frozen(kw_only=True)
class Environment(Spec):
    """What answers the policy's completions, so that an episode has several turns.

    Attributes:
        name: What `@nnxdsl.environment(name)` or `nnxdsl.tools(name, ...)` registered, or `module:class`, which is
            imported where it is needed and allowed; see `nnxdsl.allow_imports`.
        max_turns: Most completions of an episode. All of them and the observations between them share
            `max_completion_length`.
        timeout: Seconds that one call may take, after which the run ends with an error; None for no limit.
    """

    outside_identity: ClassVar[frozenset[str]] = frozenset({"timeout"})

    name: str = attrs.field(kw_only=False, validator=function_name)
    max_turns: int = attrs.field(default=8, validator=Limit(at_least=2))
    timeout: float | None = attrs.field(default=60.0, validator=positive)

    def import_names(self) -> Mapping[str, str]:
        """The class's name, unless it is registered."""
        return {"name": self.name} if ":" in self.name and self.name not in environments else {}


def environment(name: str) -> Callable[[EnvironmentT], EnvironmentT]:
    """Registers a class as the environment of this name.

    For each episode it is called without arguments. `reset(**row)` then gets the columns of the row that it has
    parameters for, and returns None; if it is annotated to return `str`, that text is added to the last message of the
    prompt when rows are read. After each completion `step(text)` gets its text, without the end token, and returns
    `(observation, reward, done)`: the text that the policy reads before its next turn, what the completion is worth,
    and whether the episode is over.

    A class without `step` is one of TRL's `environment_factory`: every other public method is a tool, whose type hints
    and docstring in Google's format are in the prompt by the chat template. The calls of a completion are run, and the
    policy reads the results, or `{"error": ...}` of what raises; a completion without a call ends the episode.

    A method `get_reward()` of either kind returns what the episode is worth, once it is over, and `close()` ends
    what the object holds.

    All must depend on the row and the texts alone, otherwise a resumed run differs from an uninterrupted one.

    >>> import nnxdsl
    >>> @nnxdsl.environment("guess a number")
    ... class Guess:
    ...     def reset(self, number: int) -> None:
    ...         self.number = number
    ...
    ...     def step(self, text: str) -> tuple[str, float, bool]:
    ...         found = text.strip() == str(self.number)
    ...         return ("right" if found else "try again"), float(found), found

    Args:
        name: The name, such as `Environment(name)` has; a later class takes the place of an earlier one.

    Raises:
        SpecError: `Environment(name)` cannot have the name.
    """
    Environment(name)

    def register(cls: EnvironmentT) -> EnvironmentT:
        environments[name] = cls
        return cls

    return register


class _Tools:
    """Functions as an environment that has no state."""

    def reset(self) -> None:
        """Nothing to begin with."""


def tools(name: str, *functions: Callable[..., Any]) -> None:
    """Registers functions as the environment of this name, in which the policy can call them.

    >>> import nnxdsl
    >>> def multiply(a: float, b: float) -> float:
    ...     '''Multiplies two numbers.
    ...
    ...     Args:
    ...         a: The first.
    ...         b: The second.
    ...     '''
    ...     return a * b
    >>> nnxdsl.tools("calculator", multiply)

    Args:
        name: The name, such as `Environment(name)` has; later functions take the place of earlier ones.
        functions: Tools, each with type hints and a docstring; they may be `async`.

    Raises:
        SpecError: `Environment(name)` cannot have the name.
    """
    methods = {function.__name__: staticmethod(function) for function in functions}
    environment(name)(type(name, (_Tools,), methods))
