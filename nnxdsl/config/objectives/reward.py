"""What a policy's answers are worth: rewards are named in specs, and are plain Python functions under those names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, function_name

Function = Callable[..., float]
"""`function(completion, **columns)`: from the text of an answer, and what the row has beside its prompt."""
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

functions: dict[str, Function] = {}
"""Every registered reward by its name."""


@attrs.frozen(kw_only=True)
class Reward(Spec):
    """One reward of a policy's answers, by the name of its function.

    Attributes:
        name: What `@nnxdsl.reward(name)` registered, or `module:function`, which is imported where it is needed and
            allowed; see `nnxdsl.allow_imports`.
        weight: What it is multiplied by in the sum of all rewards. A penalty is a function that gives negative numbers.
    """

    name: str = attrs.field(kw_only=False, validator=function_name)
    weight: float = attrs.field(default=1.0, validator=Limit(above=0))

    def import_names(self) -> Mapping[str, str]:
        """The function's name, unless it is registered."""
        return {"name": self.name} if ":" in self.name and self.name not in functions else {}


def reward(name: str) -> Callable[[FunctionT], FunctionT]:
    """Registers a function as the reward of this name.

    The function is called with the text of one answer, its end token left out, as `completion`, or as its first
    parameter if none has this name; and with those of the row's columns that it has parameters for, by name (all of
    them, if it takes `**columns`). `prompt` is the prompt as the row has it, text or messages. It gives a finite
    number. It must be a pure function, or a resumed run is another one.

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
