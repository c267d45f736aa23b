"""Completions in a run's directory: recorded before a step learns from them, and read by a run that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from nnxdsl.runtime.distributed import on_process_0
from nnxdsl.storage.jsonl import read_json, write_json


@attrs.frozen
class Recording:
    """Rollouts by step, where the engine would not sample the same completions again.

    Attributes:
        directory: One file a step.
        checkpoints: The directory of the run's checkpoints; steps before the oldest are deleted.
    """

    directory: Path
    checkpoints: Path

    def read(self, step: int) -> dict[str, Any] | None:
        """What was recorded of a step; None for nothing."""
        return on_process_0(lambda: read_json(self._file(step)) if self._file(step).is_file() else None)

    def write(self, step: int, content: dict[str, Any]) -> None:
        """Records a step; a kill leaves all of it, or nothing."""
        on_process_0(lambda: self._write(step, content))

    def _write(self, step: int, content: dict[str, Any]) -> None:
        self.directory.mkdir(exist_ok=True)
        write_json(self._file(step), content)
        oldest = min((int(path.name) for path in self.checkpoints.glob("*") if path.name.isdecimal()), default=0)
        for file in self.directory.glob("step-*.json"):
            if int(file.stem.removeprefix("step-")) < oldest:
                file.unlink()

    def _file(self, step: int) -> Path:
        return self.directory / f"step-{step:08}.json"
