"""Stops a run between two steps when a signal or its directory asks for it."""

from __future__ import annotations

import attrs

from nnxdsl.runtime import distributed
from nnxdsl.trainer.attempt import STOP_FILE, Attempt
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.trainer import Trainer


@attrs.define
class StopOnRequest(Hook):
    """Stops all processes of a run before the same step, whichever of them was asked to.

    Attributes:
        attempt: The run.
    """

    attempt: Attempt
    _vote: distributed.Vote = attrs.field(factory=distributed.Vote, init=False)

    def on_step_begin(self, trainer: Trainer) -> None:
        """Stops the loop if any process was asked to stop before the step before this one."""
        if trainer.step < trainer.total_steps and self._vote(self.attempt.stop_signal()):
            trainer.stop()

    def agree_on_signal(self) -> int | None:
        """The signal that stopped the run, the same in all processes; None if its directory asked for it."""
        signal = distributed.all_max(self.attempt.stop_signal())
        self.attempt.stop_request.signal = None if signal == STOP_FILE else signal
        return self.attempt.stop_request.signal
