"""The interface of hooks: callbacks of the training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from nnxdsl.errors import RunError
from nnxdsl.planning.flops import Flops

if TYPE_CHECKING:
    from nnxdsl.trainer.trainer import Trainer


class StepMetrics(NamedTuple):
    """Metrics of one step, on the host.

    Attributes:
        step: The step, from 0.
        values: By name.
        flops: What the step costs.
        seconds: Its time, from the end of the step before.
    """

    step: int
    values: Mapping[str, float]
    flops: Flops
    seconds: float

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.values["loss"]) and math.isfinite(self.values["grad_norm"])


def taken_metric(step: int, name: str) -> RunError:
    """The error for a metric of a reward function that has the name of one of the run's own."""
    return RunError(f"step {step}: '{name}' is a metric of the run itself; give that of log_metric another name")


class Hook:
    """A callback of the training loop. A subclass defines the methods that it needs.

    Each method is called in all processes of a run at the same places, with the loop: `trainer.step` steps are done,
    `trainer.state` is the state after them. The hooks of a loop are called in their order, and at its end in reverse.
    What a hook raises ends the loop.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step of this loop."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Before each step, and once after the last one. `trainer.stop()` ends the loop here.

        The metrics of the last step may not have been read yet; `trainer.flush_metrics()` waits for them.
        """

    def on_step_end(self, trainer: Trainer) -> None:
        """After each step was started; the devices still compute it."""

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """When the metrics of a step are on the host: usually while the step after it is computed."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, or after `trainer.stop()`; not after an error."""
