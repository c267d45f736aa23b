"""Messages of a run to the terminal, its log, its events and its status. Decides nothing."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Mapping
from types import TracebackType

from nnxdsl.errors import RunError
from nnxdsl.runs.log import Log
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.terminal.display import Display, Lines, duration, number

SHOWN = (("reward", "completions/mean_length"), ("rewards/accuracies", "rewards/margins"), ("mean_token_accuracy",))
"""Metrics shown in a line beside the loss: the first group of which any is there."""

LOG_SECONDS = 10.0
"""Least time between two steps in the log."""


class Reporter:
    """Reports one attempt; a context manager, within which its log is open.

    Args:
        directory: The run's files.
        display: What people see.
    """

    def __init__(self, directory: RunDirectory, display: Display) -> None:
        self._directory, self._display = directory, display
        self._last_logged = -math.inf

    def __enter__(self) -> Reporter:
        self._log = Log(self._directory.log)
        self._phases = Lines(self.log)  # the steps have lines of their own
        self._display.listeners.append(self._phases)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.listeners.remove(self._phases)
        self._phases.on_close()
        self._log.__exit__(kind, error, trace)

    def event(self, text: str) -> None:
        """Writes to the terminal, the log and the events."""
        self._directory.append_event({"event": text})
        self.info(text)

    def info(self, text: str) -> None:
        """Writes to the terminal and the log."""
        self._display.say(text)
        self.log(text)

    def log(self, text: str) -> None:
        """Writes to the log alone."""
        self._log.write(text)

    def step(
        self, done: int, total: int, values: Mapping[str, float], rates: Mapping[str, float], *, is_stopping: bool
    ) -> None:
        """Reports a step: to the terminal and the status, and to the log now and then.

        Args:
            done: Steps done.
            total: Steps of the run.
            values: Metrics of the last one.
            rates: Throughput by unit.
            is_stopping: Whether the run is about to stop.
        """
        shown = headline(values)
        self._display.step(done, total, shown, rates)
        eta = self._display.eta_seconds
        state, left = "stopping" if is_stopping else "running", None if eta is None else round(eta, 1)
        self._directory.beat(state=state, step=done, stage="training", eta_seconds=left)
        if done == total or time.monotonic() - self._last_logged >= LOG_SECONDS:
            self._last_logged = time.monotonic()
            figures = [f"{name} {number(value)}" for name, value in {**shown, **rates}.items()]
            ends = [] if eta is None else [f"{duration(eta)} left"]
            self.log(", ".join([f"step {done}/{total}", *figures, *ends]))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports the main metrics of an evaluation."""
        shown = headline({name.removeprefix("eval/"): value for name, value in metrics.items()})
        self.info(f"step {step}, held out: {', '.join(f'{name} {number(value)}' for name, value in shown.items())}")

    def failed(self, error: BaseException) -> None:
        """Records why the run failed. Errors of writing are dropped, so that they never hide the failure itself."""
        self.log("".join(traceback.format_exception(error)))
        self._end(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def lost(self, why: str) -> None:
        """Records that another process of the run is gone, and that this one ends."""
        error = f"{why}; the run stops here; start it again to resume from its last checkpoint"
        self.log(error)
        self._end(error)

    def _end(self, error: str) -> None:
        with contextlib.suppress(RunError):
            self._directory.append_event({"event": "failed", "error": error})
        with contextlib.suppress(RunError):
            self._directory.write_status(state="failed", error=error, exit_code=1, eta_seconds=None)


def headline(values: Mapping[str, float]) -> dict[str, float]:
    """The main metrics: the loss, and one group of `SHOWN`."""
    group = next((names for names in SHOWN if any(name in values for name in names)), ())
    return {name: values[name] for name in ("loss", *group) if name in values}
