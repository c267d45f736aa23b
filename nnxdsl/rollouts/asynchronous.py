"""When completions are sampled: between steps, or those of later steps while devices train."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import attrs

from nnxdsl.rollouts.episode import Episode

T = TypeVar("T")


class Sampled(NamedTuple):
    """The completions of a step, with their rewards.

    Attributes:
        episodes: The completions.
        metrics: Of these.
        extra_batches: Batches of prompts that dynamic sampling has taken beyond the first of each step, up to this one.
    """

    episodes: list[Episode]
    metrics: dict[str, float]
    extra_batches: int


SampleStep = Callable[[int, Any, int], Sampled]
"""Samples a step with weights of the engine; the number is `extra_batches` of the step before."""


@attrs.frozen
class Synchronous:
    """Samples a step once it is to be trained.

    Attributes:
        sample: Samples a step.
    """

    sample: SampleStep

    def take(self, step: int, weights: Any, extra_batches: int) -> Sampled:
        """The completions of a step; see `Asynchronous.take`."""
        return self.sample(step, weights, extra_batches)

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function that samples."""
        return function()

    def close(self) -> None:
        """Does nothing."""


@attrs.define(eq=False)
class Asynchronous:
    """Samples one step after the other in a thread, at most so many steps ahead of the one that is trained.

    Attributes:
        sample: Samples a step.
        max_staleness: Updates of the weights between those that sample and those that learn, at most; above 0.
        stride: Steps that learn from the same completions.
        total_steps: Of the run.
    """

    sample: SampleStep
    max_staleness: int
    stride: int
    total_steps: int
    _thread: ThreadPoolExecutor = attrs.field(init=False)
    _waiting: dict[int, Future[Sampled]] = attrs.field(factory=dict, init=False)
    _extra_batches: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "sampling")

    def take(self, step: int, weights: Any, extra_batches: int) -> Sampled:
        """The completions of a step; those of the steps after it are begun with the weights before it.

        Args:
            step: Whose completions nothing has taken yet.
            weights: Of the engine, before the step.
            extra_batches: Of the step before, if nothing was sampled yet.
        """
        if not self._waiting:
            self._extra_batches = extra_batches
        for ahead in range(self.max_staleness + 1):
            later = step + ahead * self.stride
            if later not in self._waiting and later < self.total_steps:
                self._waiting[later] = self._thread.submit(self._next, later, weights, step)
        return self._waiting.pop(step).result()

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function that samples, once what has been begun is sampled."""
        return self._thread.submit(function).result()

    def close(self) -> None:
        """Gives up what has not begun, and waits for what has."""
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True)

    def _next(self, step: int, weights: Any, version: int) -> Sampled:
        rollout = self.sample(step, weights, self._extra_batches)
        self._extra_batches = rollout.extra_batches
        staleness = (step - version) / self.stride
        return rollout._replace(metrics={**rollout.metrics, "sampling/staleness": staleness})
