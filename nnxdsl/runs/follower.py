"""The run directory in processes other than process 0: they read it, and write nothing but their log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nnxdsl.runs.run_dir import RunDirectory


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

    def _do_nothing(self, *_: Any, **__: Any) -> None: ...

    write_layout = write_status = restore_status = clear_requests = _do_nothing
    append_metrics = append_evaluation = append_sample = append_rollout = append_event = _do_nothing

    def append_attempt(self, *_: Any, **__: Any) -> int:
        """Does nothing; the number 0 is never written."""
        return 0

    def repair_rows(self, *_: Any, **__: Any) -> list[str]:
        """Does nothing."""
        return []
