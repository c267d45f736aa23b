"""The Trackio tracker."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

from nnxdsl.config.recording.tracking import Trackio
from nnxdsl.errors import RunError
from nnxdsl.tracking.base import End, TrackedRun, Tracker, open_tracker


@open_tracker.register(Trackio)
class TrackioTracker(Tracker):
    """One run of Trackio, which later attempts continue by its name."""

    def __init__(self, settings: Trackio, run: TrackedRun) -> None:
        """Starts the run, or resumes the newest one of its name."""
        self._is_local = settings.space is None
        self._failures: list[str] = []
        self._listen()
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

    def flush(self) -> None:
        """Raises the first failure so far; requests that a Space rejects are retried later."""
        if self._is_local:
            self._raise_failure()

    def finish(self, end: End) -> None:
        """Waits until everything is sent."""
        self._run.finish()
        self._raise_failure()

    def _listen(self) -> None:
        """Trackio raises nothing: its failures are Python warnings, most of them in its own thread."""
        show = warnings.showwarning

        def listen(message: Any, category: type[Warning], filename: str, *rest: Any) -> None:
            if "trackio" in filename:
                self._failures.append(str(message))
            show(message, category, filename, *rest)

        warnings.showwarning = listen
        warnings.filterwarnings("default", category=UserWarning)  # whatever PYTHONWARNINGS says

    def _raise_failure(self) -> None:
        if self._failures:
            raise RunError(self._failures[0])
