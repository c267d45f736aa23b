"""Ends a run at a step whose loss is NaN or infinite, and reports the steps that a guard skipped."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from nnxdsl.config.step_guard import Guard
from nnxdsl.errors import RunError
from nnxdsl.optim.step_guard import IN_A_ROW, SKIPPED, TOTAL
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook, StepMetrics
from nnxdsl.trainer.hooks.checkpointing import Checkpointing
from nnxdsl.trainer.trainer import Trainer

_ROWS_SHOWN = 8


@attrs.define
class NonFiniteSteps(Hook):
    """Stops the run or reports a skipped step after a non-finite or spiking loss or gradient.

    Attributes:
        attempt: The run.
        guard: How many steps may be skipped.
        checkpointing: Saves the state before a step that ends the run.
    """

    attempt: Attempt
    guard: Guard
    checkpointing: Checkpointing

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Checks the metrics of a step.

        Raises:
            RunError: The step is not finite and was not skipped, or too many were.
        """
        values, step = metrics.values, metrics.step
        if values.get(SKIPPED):
            self._record_skipped(trainer, step, values)
        elif not metrics.is_finite:
            raise RunError(
                f"{_describe(trainer, step, values)}; {self.checkpointing.rescue(trainer, step)}; lower the learning "
                "rate, look at those rows, or skip such steps with guard=Guard.Skip()"
            )

    def _record_skipped(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        """Reports a step that changed nothing, and ends the run after too many."""
        in_a_row, total, guard = int(values[IN_A_ROW]), int(values[TOTAL]), self.guard
        self.attempt.reporter.event(f"{_describe(trainer, step, values)}; skipped, {in_a_row} in a row, {total} in all")
        for name, count in (("max_in_a_row", in_a_row), ("max_total", total)):
            if count > getattr(guard, name, count):
                last = self.checkpointing.last_saved()
                raise RunError(f"{count} steps were skipped by step {step}, more than guard.{name}; {last}")


def _describe(trainer: Trainer, step: int, values: Mapping[str, float]) -> str:
    """Loss and gradient norm of a step, and which rows it trained on."""
    rows = ", ".join(trainer.batches.row_ids(step)[:_ROWS_SHOWN])
    return f"step {step}: loss is {values['loss']:.4g}, grad_norm {values['grad_norm']:.4g}; its rows begin with {rows}"
