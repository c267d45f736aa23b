"""Rewards of completions: the family, and those that are plain Python functions under a registered name."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, filled, function_name, positive

if TYPE_CHECKING:
    from nnxdsl.config.objectives import reward_library as library

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

functions: dict[str, Callable[..., Any]] = {}
"""Every registered function by its name."""


@attrs.frozen(kw_only=True)
class Reward(Spec):
    """What completions are worth. `Reward("name")` is `Reward.Function("name")`.

    Attributes:
        name: Of the metrics `rewards/NAME/mean` and `rewards/NAME/std`.
        weight: Its weight in the sum of all rewards. A penalty has negative values, and a positive weight.
    """

    Function: ClassVar[type[Function]]
    MathAccuracy: ClassVar[type[library.MathAccuracy]]
    ThinkFormat: ClassVar[type[library.ThinkFormat]]
    RepetitionPenalty: ClassVar[type[library.RepetitionPenalty]]
    CosineLength: ClassVar[type[library.CosineLength]]
    SoftOverlong: ClassVar[type[library.SoftOverlong]]
    Environment: ClassVar[type[library.Environment]]
    Model: ClassVar[type[library.Model]]

    default_member: ClassVar[str] = "Function"
    timeout: ClassVar[float | None] = None
    """Seconds that one call of its function may take; None for no limit."""
    max_concurrency: ClassVar[int] = 1
    """Calls of its function at one time, if that is `async`."""

    name: str = attrs.field(validator=filled)
    weight: float = attrs.field(default=1.0, validator=positive)

    if TYPE_CHECKING:

        def __init__(
            self, name: str, *, weight: float = ..., timeout: float | None = ..., max_concurrency: int = ...
        ) -> None: ...
    else:

        def __new__(cls, *name: str, **fields: object) -> Reward:
            """An object of the class, whose `__init__` fills it; `Reward` itself with a name is `Reward.Function`."""
            return object.__new__(Function if cls is Reward and (name or "name" in fields) else cls)

    @classmethod
    def hint_for(cls, value: object) -> str:
        """A text is the name of a function, or is meant to be one of the members."""
        hint = super().hint_for(value)
        return f"; write Reward({value!r})" if hint and isinstance(value, str) else hint


@attrs.frozen(kw_only=True)
class Function(Reward):
    """A Python function.

    Attributes:
        name: What `@nnxdsl.reward(name)` registered, or `module:function`, which is imported where it is needed and
            allowed; see `nnxdsl.allow_imports`.
        timeout: Seconds that one call may take, after which the run ends with an error; None for no limit, which also
            calls a function that is not `async` in the thread of the training loop, where it may use signals.
        max_concurrency: Calls of an `async` function that run at one time.
    """

    earlier_tag: ClassVar[str] = "Reward"
    outside_identity: ClassVar[frozenset[str]] = frozenset({"timeout", "max_concurrency"})

    name: str = attrs.field(kw_only=False, validator=function_name)
    timeout: float | None = attrs.field(default=600.0, validator=positive)
    max_concurrency: int = attrs.field(default=64, validator=Limit(at_least=1))

    def import_names(self) -> Mapping[str, str]:
        """The function's name, unless it is registered."""
        return {"name": self.name} if ":" in self.name and self.name not in functions else {}


def reward(name: str) -> Callable[[FunctionT], FunctionT]:
    """Registers a function as the reward of this name.

    A function of one completion gets its text, without the end token, as `completion`, or as its first parameter if
    none has this name; and those of the row's columns that it has parameters for, by name (all of them, if it takes
    `**columns`). `prompt` is the prompt of the row, text or messages. It returns a finite number, or None where it
    does not apply.

    A function with a parameter `completions` is called once for all completions of a step, as TRL calls its own:
    with `prompts`, `completions`, `completion_ids` and each column as lists. It returns a list with a value for each.

    Both may be `async`, and both may ask for `completion_ids`, the token ids, end token included; for
    `log_metric(name, value)`, which reports the mean of all values; and for `log_extra(column, values)`, which
    records a value of each completion. It must be a pure function, otherwise a resumed run differs from an
    uninterrupted one.

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
