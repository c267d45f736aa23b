"""Shows how far a run is: display, heartbeat in the status, log."""

from __future__ import annotations

import attrs

from nnxdsl.terminal.events import Phase
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook, StepMetrics
from nnxdsl.trainer.throughput import Speed
from nnxdsl.trainer.trainer import Trainer


@attrs.define
class Progress(Hook):
    """Reports each step.

    Attributes:
        attempt: The run.
        speed: Throughput from the time of a step.
    """

    attempt: Attempt
    speed: Speed
    _first_step: Phase | None = attrs.field(default=None, init=False)

    def on_step_begin(self, trainer: Trainer) -> None:
        """Shows the first step, which is compiled, until its metrics are there."""
        if trainer.step == trainer.start < trainer.total_steps:
            self._first_step = self.attempt.display.begin("first step")

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Reports a step."""
        if self._first_step is not None:
            self.attempt.display.end(self._first_step)
            self._first_step = None
        rates = self.speed.rates(metrics.values["num_tokens"], metrics.seconds)
        is_stopping = self.attempt.stop_signal() != 0
        self.attempt.reporter.step(
            metrics.step + 1, trainer.total_steps, metrics.values, rates, is_stopping=is_stopping
        )
