"""Writes a row of metrics for each step."""

from __future__ import annotations

import attrs

from nnxdsl.optim.step_guard import SKIPPED
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook, StepMetrics, taken_metric
from nnxdsl.trainer.throughput import Speed, peak_memory_gib
from nnxdsl.trainer.trainer import Trainer


@attrs.define
class MetricsWriter(Hook):
    """Writes `metrics.jsonl`, with throughput and memory, and counts the tokens of the run.

    Attributes:
        attempt: The run.
        speed: Throughput from the time of a step.
        tokens: Of all steps so far, without those of a step that was refused.
    """

    attempt: Attempt
    speed: Speed
    tokens: int

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Appends the row of a step.

        Raises:
            RunError: A reward function reports a metric under the name of one of these.
        """
        values, seconds = metrics.values, metrics.seconds
        tokens = self.tokens + int(values["num_tokens"])
        measured = {
            **self.speed.rates(values["num_tokens"], seconds),
            **self.speed.use(metrics.flops, seconds),
            "peak_memory_gib": peak_memory_gib(trainer.program.mesh.local_devices),
        }
        if taken := measured.keys() & values.keys():
            raise taken_metric(metrics.step, min(taken))
        row = {"step": metrics.step, "attempt": self.attempt.number, **values, "num_tokens": tokens, **measured}
        self.attempt.directory.append_metrics(row)
        self.attempt.display.metrics(row)
        if values.get(SKIPPED) or metrics.is_finite:
            self.tokens = tokens
