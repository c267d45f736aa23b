"""A run whose rows a test writes, each attempt with its tracking process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from nnxdsl import Tracking, to_dict
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.tracking import End, TrackingProcess
from tests.waiting import HANG_SECONDS


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@attrs.frozen
class Written:
    """A run directory and its writer.

    Attributes:
        directory: The run.
    """

    directory: RunDirectory

    @classmethod
    def make(cls, path: Path) -> Written:
        return cls(RunDirectory.create(path, identity="", experiment_json={}, experiment_py=""))

    def begin(self, *tracking: Tracking, start: int = 0) -> TrackingProcess:
        """Begins an attempt at step `start`, and its process."""
        experiment = {"type": "Experiment", "name": "written", "tracking": [to_dict(each) for each in tracking]}
        number = self.directory.append_attempt({"experiment": experiment, "start": start})
        self.directory.repair_rows(start)
        return TrackingProcess(self.directory.path, tracking, number)

    def train(self, steps: Sequence[int], evaluate: Sequence[int] = (0,)) -> None:
        """Writes the rows of steps: `steps/s` is the attempt's number, and the loss of step 2 is NaN."""
        attempt = len(self.directory.attempts())
        for step in steps:
            if step in evaluate:
                self.directory.append_evaluation({"step": step, "attempt": attempt, "eval/loss": step / 2})
            loss = float("nan") if step == 2 else 1 / (step + 1)
            self.directory.append_metrics({"step": step, "attempt": attempt, "loss": loss, "steps/s": attempt})


def end(process: TrackingProcess, mode: End, seconds: float = HANG_SECONDS) -> list[str]:
    """Ends a process and waits for it; its warnings."""
    process.end(mode)
    return list(process.wait(seconds))
