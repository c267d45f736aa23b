"""The Weights & Biases tracker."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping

from nnxdsl.config.recording.tracking import WandB
from nnxdsl.tracking.base import End, TrackedRun, Tracker, open_tracker


@open_tracker.register(WandB)
class WandBTracker(Tracker):
    """One run of W&B, which later attempts continue by its id."""

    def __init__(self, settings: WandB, run: TrackedRun) -> None:
        """Starts or resumes the run; its files lie in the run directory."""
        library = importlib.import_module("wandb")
        self._run = library.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            name=run.id,
            # Not the run's id alone: a run that begins again in another directory is another run of W&B.
            id=run.saved.setdefault("id", f"{run.id}-{secrets.token_hex(3)}"),
            resume="allow",
            dir=run.files,
            config=dict(run.experiment),
            allow_val_change=True,  # devices and the like may differ between attempts
            settings=library.Settings(console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics, which W&B joins by step."""
        self._run.log(dict(metrics), step=step)

    def finish(self, end: End) -> None:
        """Waits until everything is sent."""
        self._run.finish(exit_code=0 if end in ("finished", "stopped") else 1)
