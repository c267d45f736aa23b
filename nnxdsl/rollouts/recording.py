"""Completions in a run's directory: recorded before a step learns from them, and read by a run that resumes."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.storage.jsonl import read_json, write_json


@attrs.define
class Recording:
    """Rollouts by step, where the engine would not sample the same completions again.

    Attributes:
        directory: One file a step.
        keep: Checkpoints that are kept: steps before all of them are deleted.
    """

    directory: Path
    keep: int
    _checkpoints: deque[int] = attrs.field(factory=deque, init=False)

    def read(self, step: int) -> dict[str, Any] | None:
        """What was recorded of a step; None for nothing."""
        return read_json(self._file(step)) if self._file(step).is_file() else None

    def write(self, step: int, content: dict[str, Any]) -> None:
        """Records a step; a kill leaves all of it, or nothing."""
        self.directory.mkdir(exist_ok=True)
        write_json(self._file(step), content)

    def on_checkpoint(self, step: int) -> None:
        """Deletes what no checkpoint resumes from, now that one of this step is written beside the others."""
        self._checkpoints.append(step)
        if len(self._checkpoints) <= self.keep + 1:
            return
        oldest = self._checkpoints.popleft()
        for file in self.directory.glob("step-*.json"):
            if int(file.stem.removeprefix("step-")) < oldest:
                file.unlink()

    def _file(self, step: int) -> Path:
        return self.directory / f"step-{step:08}.json"
