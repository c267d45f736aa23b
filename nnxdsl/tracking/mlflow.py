"""The MLflow tracker."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from nnxdsl.config.recording.tracking import MLflow
from nnxdsl.tracking.base import End, TrackedRun, Tracker, open_tracker

MAX_PARAMS = 100
"""Parameters in one request."""
MAX_METRICS = 1000
"""Metrics in one request."""

_STATUS: dict[End, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "killed": "KILLED"}


@open_tracker.register(MLflow)
class MLflowTracker(Tracker):
    """One run of MLflow, which later attempts continue by its id."""

    def __init__(self, settings: MLflow, run: TrackedRun) -> None:
        """Starts or resumes the run; settings are written as parameters when it is new, since they cannot change."""
        library = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = library.MlflowClient(tracking_uri=settings.uri)
        self._metrics: list[Any] = []
        if "id" in run.saved:
            self._client.update_run(run.saved["id"], status="RUNNING")
        else:
            existing = self._client.get_experiment_by_name(settings.experiment)
            experiment = existing.experiment_id if existing else self._client.create_experiment(settings.experiment)
            started = self._client.create_run(experiment, run_name=run.id, tags={"nnxdsl.run": run.id})
            run.saved["id"] = started.info.run_id
            params = [self._entities.Param(name, str(value)) for name, value in run.settings().items()]
            for batch in _batches(params, MAX_PARAMS):
                self._client.log_batch(run.saved["id"], params=batch)
        self._id = run.saved["id"]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collects the metrics for the next request."""
        now = int(time.time() * 1000)
        self._metrics += [self._entities.Metric(name, float(value), now, step) for name, value in metrics.items()]

    def flush(self) -> None:
        """Sends the metrics."""
        for batch in _batches(self._metrics, MAX_METRICS):
            self._client.log_batch(self._id, metrics=batch)
        self._metrics.clear()

    def finish(self, end: End) -> None:
        """Sets the status."""
        self._client.set_terminated(self._id, _STATUS[end])


def _batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
