"""Classes of environments by name: registered with `@nnxdsl.environment(name)`, or imported as `module:class`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from nnxdsl.config.core.imports import find_named
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.environment import Environment, environments
from nnxdsl.config.objectives.online import Online
from nnxdsl.data.environments.tool_schema import tool_schema
from nnxdsl.data.tokenizers.messages import Tools
from nnxdsl.errors import PlanError, Problem

NOT_TOOLS = ("reset", "step", "get_reward", "close")
"""Public methods that a model cannot call."""


def class_of(spec: Environment) -> Callable[..., Any]:
    """The class of an environment.

    Raises:
        PlanError: It is not known, or has no `reset`, or neither `step` nor a tool.
    """
    try:
        environment_class = find_named(spec.name, environments, "environment", "class")
    except ValueError as error:
        raise _refused(str(error)) from error
    if not has_method(environment_class, "reset"):
        raise _refused(f"the class of '{spec.name}' has no method 'reset'")
    if not has_method(environment_class, "step") and not tool_names(environment_class):
        raise _refused(f"the class of '{spec.name}' has neither a method 'step' nor one that is a tool")
    return environment_class


def has_method(cls: Any, name: str) -> bool:
    """Whether a class has a method, such as `step` where its objects are no set of tools."""
    return callable(getattr(cls, name, None))


def tool_names(cls: Any) -> tuple[str, ...]:
    """The methods that a model can call, in their order in the class."""
    names = dict.fromkeys(name for each in reversed(inspect.getmro(cls)) for name in vars(each))
    public = [name for name in names if not name.startswith("_") and name not in NOT_TOOLS]
    return tuple(name for name in public if callable(getattr(cls, name)))


def registered_environment(objective: Objective) -> tuple[Environment, Callable[..., Any]] | None:
    """The environment of an objective with its class; None if it has none, or one whose class is not known.

    Rows are also read where nothing is played, by processes that have not imported a run's code; whoever plays asks for
    the class by `class_of`.
    """
    if not isinstance(objective, Online) or objective.environment is None:
        return None
    try:
        return objective.environment, class_of(objective.environment)
    except PlanError:
        return None


def tools_of(objective: Objective) -> Tools:
    """Schemas of the tools that an objective's environment gives to the policy; see `registered_environment`.

    Raises:
        PlanError: A tool has no docstring or types.
    """
    registered = registered_environment(objective)
    if registered is None or has_method(registered[1], "step"):
        return []
    spec, cls = registered
    try:
        return [tool_schema(getattr(cls, name)) for name in tool_names(cls)]
    except ValueError as error:
        raise _refused(f"a tool of '{spec.name}': {error}") from error


def _refused(message: str) -> PlanError:
    return PlanError([Problem("objective.environment.name", message)], "environment")
