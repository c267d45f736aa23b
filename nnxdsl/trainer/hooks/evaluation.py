"""Evaluates between steps."""

from __future__ import annotations

import itertools

import attrs

from nnxdsl.errors import RunError
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.evaluation import Evaluator
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.trainer import Trainer


@attrs.define
class PeriodicEvaluation(Hook):
    """Writes held-out metrics and samples every so many steps and after the last one.

    Attributes:
        attempt: The run.
        evaluator: Evaluates a state.
    """

    attempt: Attempt
    evaluator: Evaluator

    def on_step_begin(self, trainer: Trainer) -> None:
        """Evaluates the state if it is due; stops the loop if it is interrupted, so that a resume evaluates again."""
        step = trainer.step
        if not self.evaluator.is_due(step, trainer.total_steps):
            return
        trainer.flush_metrics()
        directory, number = self.attempt.directory, self.attempt.number
        directory.write_status(stage="evaluating", step=step)
        metrics = self._metrics(trainer)
        if metrics is None:
            trainer.stop()
            return
        with self.attempt.display.phase(f"step {step}, generating samples"):
            samples = self.evaluator.samples(trainer.state)
        if metrics:
            row = {"step": step, "attempt": number, **metrics}
            directory.append_evaluation(row)
            self.attempt.display.metrics(row)
            self.attempt.reporter.evaluation(step, metrics)
        for sample in samples:
            directory.append_sample({"step": step, "attempt": number, **sample._asdict()})

    def _metrics(self, trainer: Trainer) -> dict[str, float] | None:
        display, numbers, count = self.attempt.display, itertools.count(), self.evaluator.batch_count
        phase = display.begin(f"step {trainer.step}, evaluating", count or None, unit="batches")

        def should_stop() -> bool:
            display.advance(phase, next(numbers))
            return self.attempt.should_stop()

        try:
            metrics = self.evaluator.metrics(trainer.state, should_stop)
        except RunError as error:  # such as a reward's
            raise RunError(f"step {trainer.step}, evaluating: {error}") from error
        if metrics is not None:
            display.advance(phase, count)
        display.end(phase)
        return metrics
