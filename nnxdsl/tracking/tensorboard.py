"""Event files of TensorBoard, written with tensorboardX."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from nnxdsl.config.recording.tracking import TensorBoard
from nnxdsl.tracking.base import End, TrackedRun, Tracker, open_tracker


@open_tracker.register(TensorBoard)
class TensorBoardTracker(Tracker):
    """One directory of event files for each run, one file for each attempt."""

    def __init__(self, settings: TensorBoard, run: TrackedRun) -> None:
        """Opens a file; readers drop steps from `run.first_step` on that earlier files have."""
        directory = Path(settings.directory).expanduser() / run.id
        library = importlib.import_module("tensorboardX")
        self._writer = library.SummaryWriter(str(directory), purge_step=run.first_step)
        if run.first_step == 0:
            lines = [f"    {path} = {value!r}" for path, value in run.settings().items()]  # indented: code in Markdown
            self._writer.add_text("experiment", "\n".join(lines), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Writes to the file."""
        self._writer.flush()

    def finish(self, end: End) -> None:
        """Closes the file."""
        self._writer.close()
