"""The TensorBoard tracker, by the event writer of the tensorboard package."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnxdsl.config.recording.tracking import TensorBoard
from nnxdsl.tracking.base import End, TrackedRun, Tracker, open_tracker


@open_tracker.register(TensorBoard)
class TensorBoardTracker(Tracker):
    """One directory of event files for each run, one file for each attempt."""

    def __init__(self, settings: TensorBoard, run: TrackedRun) -> None:
        """Opens a file; readers drop steps from `run.first_step` on that earlier files have."""
        directory = Path(settings.directory).expanduser() / run.id
        files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = files.EventFileWriter(str(directory))
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(run.first_step, session_log=start)
        if run.first_step == 0:
            lines = [f"    {path} = {value!r}" for path, value in run.settings().items()]  # indented: code in Markdown
            text = importlib.import_module("tensorboard.plugins.text.summary_v2").text_pb
            self._add(0, summary=text("experiment", "\n".join(lines)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a scalar for each metric."""
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))

    def flush(self) -> None:
        """Writes to the file."""
        self._writer.flush()

    def finish(self, end: End) -> None:
        """Closes the file."""
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))
