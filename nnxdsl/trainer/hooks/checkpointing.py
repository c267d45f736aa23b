"""Saves checkpoints between steps: by count, by time, before evaluations, and once more when a run is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from nnxdsl.config.recording.checkpointing import Checkpoint
from nnxdsl.program.checkpoint_views import checkpoint_arrays
from nnxdsl.runtime import distributed
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.hooks.metrics import MetricsWriter
from nnxdsl.trainer.trainer import Trainer


@attrs.define
class Checkpointing(Hook):
    """Saves when the settings say so, before a state is evaluated, and at the last step.

    What is written about a step reaches the disk before its checkpoint; the status names a step once it is committed.

    Attributes:
        attempt: The run.
        settings: How often.
        identity: Digests of everything that a resume must find unchanged.
        metrics: Counts the tokens.
        is_evaluated: Whether the state after some steps is.
    """

    attempt: Attempt
    settings: Checkpoint
    identity: Mapping[str, str]
    metrics: MetricsWriter
    is_evaluated: Callable[[int], bool] = lambda step: False
    _vote: distributed.Vote = attrs.field(factory=distributed.Vote, init=False)
    _last_step: int = attrs.field(default=0, init=False)
    _last_time: float = attrs.field(default=0.0, init=False)
    _committed: int | None = attrs.field(default=None, init=False)

    def on_start(self, trainer: Trainer) -> None:
        """Starts to count the time."""
        self._last_step, self._last_time = trainer.start, time.monotonic()

    def on_step_begin(self, trainer: Trainer) -> None:
        """Saves the state if a checkpoint is due. The state that the loop began with is saved already."""
        step, is_late = trainer.step, self._is_late(trainer)
        by_steps = step == trainer.total_steps or step % self.settings.every_steps == 0 or self.is_evaluated(step)
        if step > trainer.start and (by_steps or is_late):
            self._save(trainer, step)

    def _is_late(self, trainer: Trainer) -> bool:
        """Whether the time is up by the clock of any process; all of them save the same step."""
        minutes = self.settings.every_minutes
        if minutes is None:
            return False
        is_late = self._vote(int(time.monotonic() - self._last_time >= 60 * minutes))
        return bool(is_late) and trainer.step > self._last_step + 1  # a vote arrives one step after it was cast

    def on_step_end(self, trainer: Trainer) -> None:
        """Records whether a checkpoint was committed meanwhile."""
        self._record_committed(self.attempt.checkpoints.poll())

    def on_end(self, trainer: Trainer) -> None:
        """Saves the state at which a run is stopped; waits until everything is committed."""
        if trainer.is_stopping:
            self.attempt.directory.write_status(state="stopping", step=trainer.step, stage="saving")
            if trainer.step == 0:
                return
            self._save(trainer, trainer.step)
        with self.attempt.display.phase("saving the last checkpoint"):
            committed = self.attempt.checkpoints.wait()
        self._record_committed(committed)

    def rescue(self, trainer: Trainer, step: int) -> str:
        """Saves the state before a step that was refused, which no later step has changed; returns its path."""
        checkpoints = self.attempt.checkpoints
        if step == 0:
            return "there is no checkpoint yet"
        checkpoints.wait()
        if step not in checkpoints.steps():
            self._save(trainer, step)
        self._record_committed(checkpoints.wait())
        return f"the state before it is saved as step {step}"

    def last_saved(self) -> str:
        """Which checkpoint is the last one, once everything is committed."""
        self.attempt.checkpoints.wait()
        steps = self.attempt.checkpoints.steps()
        return f"the last checkpoint is step {steps[-1]}" if steps else "there is no checkpoint yet"

    def _save(self, trainer: Trainer, step: int) -> None:
        """Starts to save a step; it counts once the checkpoints report it as committed."""
        self._last_step, self._last_time = step, time.monotonic()
        trainer.flush_metrics()
        self.attempt.directory.sync()
        meta: dict[str, Any] = {
            "batches": trainer.batches.checkpoint_state(step),
            "identity": dict(self.identity),
            "tokens": self.metrics.tokens,
        }
        with self.attempt.display.phase(f"saving checkpoint step {step}"):  # less what is written in the background
            self.attempt.checkpoints.save(step, checkpoint_arrays(trainer.program, trainer.state), meta)

    def _record_committed(self, step: int | None) -> None:
        if step != self._committed:
            self._committed = step
            self.attempt.directory.write_status(checkpoint=step)
            self.attempt.reporter.log(f"checkpoint step {step} saved")
