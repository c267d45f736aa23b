"""The run directory as all but the first of several processes have it: they read it, and write nothing but a log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status
from nnxdsl.storage.jsonl import Row


class Follower(RunDirectory):
    """A run that another process writes.

    Args:
        path: Of the run.
        process: Which process this is; its log is `log.<process>.txt`.
    """

    def __init__(self, path: Path, process: int) -> None:
        super().__init__(path)
        self._process = process

    @property
    def log(self) -> Path:
        """Where what this process says is kept."""
        return self.path / f"log.{self._process}.txt"

    def write_layout(self, layout: Any) -> None:
        """Nothing: the first process does."""

    def write_status(self, **fields: Unpack[Status]) -> None:
        """Nothing: the first process does."""

    def put_back(self, status: Status) -> None:
        """Nothing: the first process does."""

    def append_attempt(self, record: Row) -> int:
        """Nothing; the number is not written by this process either."""
        return 0

    def append_metrics(self, row: Row) -> None:
        """Nothing: the figures are those of all processes, and the first one has them as well."""

    def append_evaluation(self, row: Row) -> None:
        """Nothing: as `append_metrics`."""

    def append_sample(self, row: Row) -> None:
        """Nothing: as `append_metrics`."""

    def append_event(self, row: Row) -> None:
        """Nothing: the first process does."""

    def repair_rows(self, start: int, prompts: Sequence[str] = ()) -> list[str]:
        """Nothing: the first process does."""
        return []

    def clear_requests(self) -> None:
        """Nothing: the first process does."""
