"""Environments of episodes: found by name, and called within their time."""

from __future__ import annotations

import concurrent.futures
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nnxdsl.config.objectives.online import Online
from nnxdsl.data.environments.registered import class_of, has_method, tools_of
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.data.tokenizers.tool_calls import reader_of
from nnxdsl.data.user_code import source_of, submit
from nnxdsl.errors import DataError, RunError
from nnxdsl.rollouts.reply import Contract, Reply, Stepped, finite
from nnxdsl.rollouts.tool_use import ToolUse

COLUMNS = ("environment_reward", "turns")
"""What reward functions may read beside the columns of the row."""


class Environments:
    """The environments of a run's episodes.

    Args:
        objective: Which class, and how long a call may take.
        encoder: Of the policy's chats.

    Attributes:
        name: Of the class.
        tools: Schemas of what the policy may call.
        has_final_reward: Whether whole episodes have a reward, that of `get_reward`.

    Raises:
        PlanError: The class is not known, or has no `reset`, or neither `step` nor a tool.
        DataError: The chat template writes no tool calls that can be read.
    """

    def __init__(self, objective: Online, encoder: Encoder) -> None:
        assert objective.environment is not None
        self._spec, self._class = objective.environment, class_of(objective.environment)
        self.name = self._spec.name
        self._reads, self._needs = _columns_of(self._class)
        self.tools, self.has_final_reward = tools_of(objective), has_method(self._class, "get_reward")
        self._contract: Contract = Stepped()
        if self.tools:
            self._contract = ToolUse(self.tools, reader_of(encoder.template(self.tools), self.tools), encoder.guard)

    def fingerprint(self) -> str:
        """sha256 hex over the sources of the class and its tools, as far as they can be read."""
        tools = [getattr(self._class, tool["function"]["name"]) for tool in self.tools]
        return hashlib.sha256("\n".join(map(source_of, (self._class, *tools))).encode()).hexdigest()

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

        where = f"{row_id}: environment '{self._spec.name}'"

        def start() -> Any:
            made = self._class()
            if made.reset(**columns) is not None:
                raise RunError("returned something from reset; what the policy reads first is the prompt of the row")
            return made

        return self._call(start, where)

    def reply(self, environment: Any, text: str, row_id: str, turn: int) -> Reply:
        """What an environment returns for a completion.

        Raises:
            RunError: It raised, took longer than its time, or returned something else than documented.
        """
        where = f"{row_id}, turn {turn + 1}: environment '{self._spec.name}'"
        return self._call(lambda: self._contract.reply(environment, text), where)

    def final_reward(self, environment: Any, row_id: str) -> float:
        """What `get_reward` returns for an episode.

        Raises:
            RunError: It raised, took longer than its time, or returned no finite number.
        """
        where = f"{row_id}: environment '{self._spec.name}'"
        return self._call(lambda: finite(environment.get_reward()), where)

    def close(self, environment: Any, row_id: str) -> None:
        """Calls `close` of an environment whose episode is over, if its class has it.

        Raises:
            RunError: It raised, or took longer than its time.
        """
        if has_method(self._class, "close"):
            self._call(environment.close, f"{row_id}: environment '{self._spec.name}'")

    def _call(self, function: Callable[[], Any], where: str) -> Any:
        """The result of a call, in a thread of its own that ends with the process if the call never returns."""
        future = submit(function, where)
        if not concurrent.futures.wait([future], self._spec.timeout).done:
            raise RunError(f"{where} has not returned within timeout={self._spec.timeout:g} s")
        error = future.exception()
        if isinstance(error, RunError):
            raise RunError(f"{where} {error}") from error
        if error is not None:
            message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise RunError(f"{where} failed with {message}") from error
        return future.result()


def _columns_of(cls: Any) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """The columns that `reset` has parameters for, None for all, and those without a default."""
    parameters = list(inspect.signature(cls.reset).parameters.values())[1:]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    needs = tuple(one.name for one in named if one.default is one.empty)
    return None if takes_all else frozenset(one.name for one in named), needs
