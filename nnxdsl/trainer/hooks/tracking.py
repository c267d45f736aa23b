"""Has the metrics of a run written to its trackers, by a process that can neither slow nor end a run that has begun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

import attrs

from nnxdsl.config.recording.tracking import Tracking
from nnxdsl.errors import PlanError
from nnxdsl.runtime import distributed
from nnxdsl.tracking import TrackingProcess
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook, StepMetrics
from nnxdsl.trainer.trainer import Trainer


@attrs.define
class Track(Hook):
    """Starts the tracking process in process 0, reports its warnings, and waits for it at the end, for a limited time.

    A context manager around the loop, so that the process hears of a failure as well.

    Attributes:
        attempt: The run.
        tracking: Its trackers.
    """

    attempt: Attempt
    tracking: Sequence[Tracking]
    _process: TrackingProcess | None = attrs.field(default=None, init=False)

    def __enter__(self) -> Track:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.end("failed")  # after `on_end` it does nothing
            self._process.close()

    def on_start(self, trainer: Trainer) -> None:
        """Starts the process.

        Raises:
            PlanError: The run is at step 0, and a tracker cannot be opened. A resume goes on without it.
        """
        if self.tracking:
            distributed.on_process_0(lambda: self._open(is_resume=trainer.start > 0))

    def _open(self, *, is_resume: bool) -> None:
        self._process = TrackingProcess(self.attempt.directory.path, self.tracking, self.attempt.number)
        if is_resume:
            return
        with self.attempt.display.phase("opening the trackers"):
            problems = self._process.open_problems()
        if problems:
            self._process.end("failed")
            list(self._process.wait())
            raise PlanError(problems, f"Experiment '{self.attempt.directory.path.name}'")

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Reports trackers that have stopped."""
        if self._process is not None:
            self._report(self._process.warnings())

    def on_end(self, trainer: Trainer) -> None:
        """Has the last rows written."""
        if self._process is not None:
            self._process.end("stopped" if trainer.is_stopping else "finished")
            with self.attempt.display.phase("waiting for the trackers"):
                self._report(self._process.wait())

    def _report(self, warnings: Iterable[str]) -> None:
        for warning in warnings:
            self.attempt.reporter.event(f"warning: {warning}")
