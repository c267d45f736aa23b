"""Reward functions: plain Python functions, registered under the names that specs refer to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, function_name

Function = Callable[..., float]
"""`function(completion, **columns)`: from the text of a completion and the other columns of the row."""
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

functions: dict[str, Function] = {}
"""Every registered reward by its name."""


@attrs.frozen(kw_only=True)
class Reward(Spec):
    """A reward of a completion, by the name of its function.

    Attributes:
        name: What `@nnxdsl.reward(name)` registered, or `module:function`, which is imported where it is needed and
            allowed; see `nnxdsl.allow_imports`.
        weight: Its weight in the sum of all rewards. A penalty is a function that returns negative numbers.
    """

    name: str = attrs.field(kw_only=False, validator=function_name)
    weight: float = attrs.field(default=1.0, validator=Limit(above=0))

    def import_names(self) -> Mapping[str, str]:
        """The function's name, unless it is registered."""
        return {"name": self.name} if ":" in self.name and self.name not in functions else {}


def reward(name: str) -> Callable[[FunctionT], FunctionT]:
    """Registers a function as the reward of this name.

    The function is called with the text of one completion, without its end token, as `completion`, or as its first
    parameter if none has this name; and with those of the row's columns that it has parameters for, by name (all of
    them, if it takes `**columns`). `prompt` is the prompt of the row, text or messages. It returns a finite
    number. It must be a pure function, otherwise a resumed run differs from an uninterrupted one.

    >>> import nnxdsl
    >>> @nnxdsl.reward("ends well")
    ... def ends_well(completion: str) -> float:
    ...     return float(completion.endswith("."))

    Args:
        name: The name, such as `Reward(name)` has; a later function takes the place of an earlier one.

    Raises:
        SpecError: `Reward(name)` cannot have the name.
    """
    Reward(name)

    def register(function: FunctionT) -> FunctionT:
        functions[name] = function
        return function

    return register
