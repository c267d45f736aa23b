"""The run directory in processes other than process 0: they read it, and write nothing but their log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status
from nnxdsl.storage.jsonl import Row


class Follower(RunDirectory):
    """A run that process 0 writes; methods that write do nothing.

    Args:
        path: The run directory.
        process: The index of this process; its log is `log.<process>.txt`.
    """

    def __init__(self, path: Path, process: int) -> None:
        super().__init__(path)
        self._process = process

    @property
    def log(self) -> Path:
        """The log file of this process."""
        return self.path / f"log.{self._process}.txt"

    def write_layout(self, layout: Any) -> None:
        """Does nothing: process 0 writes it."""

    def write_status(self, **fields: Unpack[Status]) -> None:
        """Does nothing: process 0 writes it."""

    def put_back(self, status: Status) -> None:
        """Does nothing: process 0 writes it."""

    def append_attempt(self, record: Row) -> int:
        """Does nothing; the number 0 is never written."""
        return 0

    def append_metrics(self, row: Row) -> None:
        """Does nothing: process 0 has the same metrics and writes them."""

    def append_evaluation(self, row: Row) -> None:
        """Does nothing: see `append_metrics`."""

    def append_sample(self, row: Row) -> None:
        """Does nothing: see `append_metrics`."""

    def append_event(self, row: Row) -> None:
        """Does nothing: process 0 writes it."""

    def repair_rows(self, start: int, prompts: Sequence[str] = ()) -> list[str]:
        """Does nothing: process 0 writes it."""
        return []

    def clear_requests(self) -> None:
        """Does nothing: process 0 writes it."""
