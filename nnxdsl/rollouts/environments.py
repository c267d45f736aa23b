"""Environments of episodes: found by name, and called within their time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nnxdsl.config.objectives.online import Online
from nnxdsl.data.environments.opening import OBSERVATION, Opener, before_reset
from nnxdsl.data.environments.registered import class_of, has_method, tools_of
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.data.tokenizers.tool_calls import reader_of
from nnxdsl.data.user_code import source_of
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
        self.name, self._class = objective.environment.name, class_of(objective.environment)
        self._opener = Opener(objective.environment, self._class)
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
            if missing := self._opener.missing(row):
                raise DataError(f"{row_id}: {missing}; it has: {', '.join(row)}")

    def new(self, row: Mapping[str, Any], row_id: str) -> Any:
        """The environment of one episode.

        Raises:
            RunError: See `Opener.open`; or `reset` returned another observation than when the row was read.
        """
        where = f"{row_id}: environment '{self.name}'"
        if not self._opener.has_observation:
            return self._opener.open(row, where).environment
        opened = self._opener.open(before_reset(row), where)
        if (opened.observation or "") != row.get(OBSERVATION):
            raise RunError(
                f"{where} returned another observation from reset than when the row was read; it must depend on the "
                f"row alone"
            )
        return opened.environment

    def reply(self, environment: Any, text: str, row_id: str, turn: int) -> Reply:
        """What an environment returns for a completion.

        Raises:
            RunError: It raised, took longer than its time, or returned something else than documented.
        """
        where = f"{row_id}, turn {turn + 1}: environment '{self.name}'"
        return self._opener.call(lambda: self._contract.reply(environment, text), where)

    def final_reward(self, environment: Any, row_id: str) -> float:
        """What `get_reward` returns for an episode.

        Raises:
            RunError: It raised, took longer than its time, or returned no finite number.
        """
        where = f"{row_id}: environment '{self.name}'"
        return self._opener.call(lambda: finite(environment.get_reward()), where)

    def close(self, environment: Any, row_id: str) -> None:
        """Ends an environment whose episode is over; see `Opener.close`."""
        self._opener.close(environment, f"{row_id}: environment '{self.name}'")
