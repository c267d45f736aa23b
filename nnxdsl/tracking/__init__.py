"""Metrics of a run in TensorBoard, W&B, Trackio, MLflow and third parties' trackers, from a separate process.

`base.Tracker` is the interface, `handle.TrackingProcess` starts the process, `process` is its main. The package of
a tracker is imported in that process alone.
"""

from nnxdsl.tracking import mlflow, tensorboard, trackio, wandb  # noqa: F401 - they register themselves
from nnxdsl.tracking.base import End, TrackedRun, Tracker, open_tracker, problems
from nnxdsl.tracking.handle import TrackingProcess, import_problems

__all__ = ["End", "TrackedRun", "Tracker", "TrackingProcess", "import_problems", "open_tracker", "problems"]
