"""Stops a run between two steps on a signal or on request in its directory."""

from __future__ import annotations

import attrs

from nnxdsl.runtime import distributed
from nnxdsl.trainer.attempt import STOP_FILE, Attempt
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.trainer import Trainer


@attrs.define
class StopOnRequest(Hook):
    """Stops all processes of a run before the same step, whichever of them has the request.

    Attributes:
        attempt: The run.
    """

    attempt: Attempt
    _vote: distributed.Vote = attrs.field(factory=distributed.Vote, init=False)

    def on_step_begin(self, trainer: Trainer) -> None:
        """Stops the loop if any process had a request to stop before the previous step."""
        if trainer.step < trainer.total_steps and self._vote(self.attempt.stop_signal()):
            trainer.stop()

    def agree_on_signal(self) -> int | None:
        """The signal that stopped the run, the same in all processes; None for a request in its directory."""
        signal = distributed.all_max(self.attempt.stop_signal())
        self.attempt.stop_request.signal = None if signal == STOP_FILE else signal
        return self.attempt.stop_request.signal
