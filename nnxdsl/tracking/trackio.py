"""Runs of Trackio."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from nnxdsl.config.recording.tracking import Trackio
from nnxdsl.tracking.base import End, TrackedRun, Tracker, open_tracker


@open_tracker.register(Trackio)
class TrackioTracker(Tracker):
    """One run of Trackio, which later attempts continue by its name."""

    def __init__(self, settings: Trackio, run: TrackedRun) -> None:
        """Starts the run, or resumes the newest one of its name."""
        self._run = importlib.import_module("trackio").init(
            project=settings.project,
            name=run.id,
            space_id=settings.space,
            config=dict(run.experiment),
            resume="allow" if run.saved else "never",
            embed=False,
        )
        run.saved["id"] = self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics."""
        self._run.log(dict(metrics), step=step)

    def finish(self, end: End) -> None:
        """Waits until everything is sent."""
        self._run.finish()
