"""Environments of episodes: found by name, and called within their time."""

from __future__ import annotations

import concurrent.futures
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nnxdsl.config.core.imports import import_name
from nnxdsl.config.objectives.environment import Environment, environments
from nnxdsl.errors import DataError, PlanError, Problem, RunError, suggest

COLUMNS = ("environment_reward", "turns")
"""What reward functions may read beside the columns of the row."""


class Reply(NamedTuple):
    """What an environment returns for a completion.

    Attributes:
        observation: The text that the policy reads next.
        reward: What the completion is worth.
        done: Whether the episode is over.
    """

    observation: str
    reward: float
    done: bool


class Environments:
    """The environments of a run's episodes.

    Args:
        spec: Which class, and how long a call may take.

    Raises:
        PlanError: The class is not known, or has no `reset` or `step`.
    """

    def __init__(self, spec: Environment) -> None:
        self._spec, self._class = spec, _class_of(spec)
        self._reads, self._needs = _columns_of(self._class)

    def check(self, columns: Iterable[Mapping[str, Any]], row_ids: Sequence[str]) -> None:
        """Raises DataError for the first row that lacks what `reset` reads, or has a column of a reserved name."""
        for row_id, row in zip(row_ids, columns, strict=True):
            if taken := sorted(row.keys() & set(COLUMNS)):
                raise DataError(f"{row_id}: the column '{taken[0]}' has the name of what environments give; rename it")
            if missing := [name for name in self._needs if name not in row]:
                message = f"environment '{self._spec.name}' reads '{missing[0]}', which the row does not have"
                raise DataError(f"{row_id}: {message}; it has: {', '.join(row)}")

    def new(self, row: Mapping[str, Any], row_id: str) -> Any:
        """The environment of one episode.

        Raises:
            RunError: Its class or `reset` raised, or took longer than its time.
        """
        columns = {name: value for name, value in row.items() if self._reads is None or name in self._reads}

        def start() -> Any:
            made = self._class()
            made.reset(**columns)
            return made

        return self._call(start, f"{row_id}: environment '{self._spec.name}'")

    def step(self, environment: Any, text: str, row_id: str, turn: int) -> Reply:
        """What an environment returns for a completion.

        Raises:
            RunError: `step` raised, took longer than its time, or returned something else than documented.
        """
        where = f"{row_id}, turn {turn + 1}: environment '{self._spec.name}'"
        found = self._call(lambda: environment.step(text), where)
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise RunError(f"{where} returned {found!r:.80}, not (observation, reward, done)")
        observation, reward, done = found
        if not isinstance(observation, str | None):
            raise RunError(f"{where} returned the observation {observation!r:.80}, which is no text")
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            raise RunError(f"{where} returned the reward {reward!r:.80}, not a finite number")
        return Reply(observation or "", float(reward), bool(done))

    def _call(self, function: Callable[[], Any], where: str) -> Any:
        """The result of a call, in a thread of its own that ends with the process if the call never returns."""
        future = concurrent.futures.Future[Any]()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # SystemExit as well: whoever waits is told
                future.set_exception(error)

        threading.Thread(target=run, name=where, daemon=True).start()
        if not concurrent.futures.wait([future], self._spec.timeout).done:
            raise RunError(f"{where} has not returned within timeout={self._spec.timeout:g} s")
        if (error := future.exception()) is not None:
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RunError(f"{where} failed with {message}") from error
        return future.result()


def _class_of(spec: Environment) -> Callable[..., Any]:
    found: Any = environments.get(spec.name)
    if found is None and ":" in spec.name:
        try:
            found = import_name(spec.name)
        except ValueError as error:
            raise _refused(str(error)) from error
    if found is None:
        raise _refused(
            f"no environment '{spec.name}' is registered{suggest(spec.name, environments)}; import the file that has "
            f"@nnxdsl.environment('{spec.name}'), or write 'module:class'"
        )
    if missing := [name for name in ("reset", "step") if not callable(getattr(found, name, None))]:
        raise _refused(f"the class of '{spec.name}' has no method '{missing[0]}'")
    return found


def _columns_of(cls: Any) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """The columns that `reset` has parameters for, None for all, and those without a default."""
    parameters = list(inspect.signature(cls.reset).parameters.values())[1:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    needs = tuple(one.name for one in named if one.default is one.empty)
    return None if takes_all else frozenset(one.name for one in named), needs


def _refused(message: str) -> PlanError:
    return PlanError([Problem("objective.environment.name", message)], "environment")
