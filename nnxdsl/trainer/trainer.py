"""The training loop: batches through the step function of a program, and hooks for everything else."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import jax

from nnxdsl.errors import RunError
from nnxdsl.planning.flops import Flops
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.runtime import allocator
from nnxdsl.trainer.batches import Batches
from nnxdsl.trainer.evaluation import Sample
from nnxdsl.trainer.hooks.base import Hook, StepMetrics, taken_metric


class TrainingError(RunError):
    """A run that began training and cannot continue: the step, and the last checkpoint."""


@attrs.frozen
class Outcome:
    """How a run ended.

    Attributes:
        directory: Its files.
        state: "finished", or "stopped" with everything saved.
        step: Optimizer steps done.
        signal: The signal that stopped it, or None.
        evaluations: Held-out metrics by step.
        samples: Completions of the evaluation's prompts by step.
    """

    directory: Path
    state: str
    step: int
    signal: int | None
    evaluations: dict[int, dict[str, float]]
    samples: dict[int, list[Sample]]


@attrs.frozen
class _PendingMetrics:
    """A step whose metrics are still on the device."""

    step: int
    values: Mapping[str, jax.Array]
    started: float
    flops: Flops
    batch_metrics: Mapping[str, float]


@attrs.define
class Trainer:
    """Trains a program on batches, and calls hooks.

    Attributes:
        program: The program, whose experiment has the number of steps.
        batches: The batch of each step.
        hooks: Called in this order.
        start: The step at which this loop began.
        step: Steps done.
        state: The state after them; the arrays of earlier states are donated.
        is_stopping: Whether a hook has ended the loop.
    """

    program: Program
    batches: Batches
    hooks: Sequence[Hook]
    start: int = attrs.field(default=0, init=False)
    step: int = attrs.field(default=0, init=False)
    state: TrainState = attrs.field(init=False)
    is_stopping: bool = attrs.field(default=False, init=False)
    _pending: _PendingMetrics | None = attrs.field(default=None, init=False)
    _last_read: float = attrs.field(default=0.0, init=False)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.program.blueprint.total_steps

    def train(self, state: TrainState, start: int = 0) -> TrainState:
        """Trains to the last step, or until a hook stops it.

        Args:
            state: After `start` steps; its arrays are donated.
            start: Steps done before.

        Returns:
            The state after the last step.
        """
        self.state, self.start, self.step = state, start, start
        del state
        with self.batches:
            for hook in self.hooks:
                hook.on_start(self)
            while not self._is_over():
                self._train_step()
                self.step += 1
            self.flush_metrics()
            for hook in reversed(self.hooks):
                hook.on_end(self)
        return self.state

    def stop(self) -> None:
        """Ends the loop before the next step."""
        self.is_stopping = True

    def _is_over(self) -> bool:
        """Calls the hooks between two steps; whether there is no further step."""
        for hook in self.hooks:
            hook.on_step_begin(self)
            if self.is_stopping:
                return True
        return self.step == self.total_steps

    def _train_step(self) -> None:
        """Starts one step, and reads the metrics of the one before while the devices compute it."""
        started = time.perf_counter()
        batch, flops, batch_metrics = self.batches.batch_at(self.step, self.state)
        self.state, metrics = self.program.step(self.state, batch)
        for value in metrics.values():
            value.copy_to_host_async()
        self.flush_metrics()
        self._pending = _PendingMetrics(self.step, metrics, started, flops, batch_metrics)
        for hook in self.hooks:
            hook.on_step_end(self)

    def flush_metrics(self) -> None:
        """Waits for the metrics of the last step, if they have not been read yet, and gives them to the hooks."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = {name: value.item() for name, value in pending.values.items()}
        if taken := values.keys() & pending.batch_metrics.keys():
            raise taken_metric(pending.step, min(taken))
        values = _present(values) | dict(pending.batch_metrics)
        if not self._last_read and self.program.blueprint.platform == "cpu":
            allocator.keep_memory()  # the step's temporaries are allocated now
        now = time.perf_counter()
        seconds, self._last_read = now - max(pending.started, self._last_read), now
        for hook in self.hooks:
            hook.on_metrics(self, StepMetrics(pending.step, values, pending.flops, seconds))


def _present(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics without means over nothing, which are NaN beside a loss that is a number."""
    if math.isnan(values["loss"]):
        return dict(values)
    return {name: value for name, value in values.items() if name == "grad_norm" or not math.isnan(value)}
