"""What a run tells while it goes on, to the person who watches, its log, events and status. Decides nothing."""

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
from nnxdsl.terminal.display import Display, duration, number

SHOWN = (("reward", "completions/mean_length"), ("rewards/accuracies", "rewards/margins"), ("mean_token_accuracy",))
"""Metrics beside the loss that there is room for in a line: the first group of which there is any."""

LOG_SECONDS = 10.0
"""Least time between two steps that are written to the log."""


class Reporter:
    """Tells of one attempt; a context manager, within which its log is open.

    Args:
        directory: The run's files.
        display: What people see.
    """

    def __init__(self, directory: RunDirectory, display: Display) -> None:
        self._directory, self._display = directory, display
        self._last_logged = -math.inf

    def __enter__(self) -> Reporter:
        self._log = Log(self._directory.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.__exit__(kind, error, trace)

    def tell(self, text: str) -> None:
        """To people, to the log, and to the events."""
        self._directory.append_event({"event": text})
        self.say(text)

    def say(self, text: str) -> None:
        """To people and to the log."""
        self._display.say(text)
        self.log(text)

    def log(self, text: str) -> None:
        """To the log alone."""
        self._log.write(text)

    def step(
        self, done: int, total: int, values: Mapping[str, float], rates: Mapping[str, float], *, is_stopping: bool
    ) -> None:
        """How far it is: to people and to the status, and to the log now and then.

        Args:
            done: Steps.
            total: Steps that there will be.
            values: Metrics of the last one.
            rates: How fast it goes, by unit.
            is_stopping: Whether it was asked to stop.
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

    def held_out(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of an evaluation by which people follow a run."""
        shown = headline({name.removeprefix("eval/"): value for name, value in metrics.items()})
        self.say(f"step {step}, held out: {', '.join(f'{name} {number(value)}' for name, value in shown.items())}")

    def failed(self, error: BaseException) -> None:
        """Writes down why it cannot go on; never hides the error itself, should the disk be full as well."""
        self.log("".join(traceback.format_exception(error)))
        self._end(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def lost(self, why: str) -> None:
        """That another process of the run is gone, and this one is about to end."""
        error = f"{why}; the run stops here, and goes on from its last checkpoint when it is started again"
        self.log(error)
        self._end(error)

    def _end(self, error: str) -> None:
        with contextlib.suppress(RunError):
            self._directory.append_event({"event": "failed", "error": error})
        with contextlib.suppress(RunError):
            self._directory.write_status(state="failed", error=error, exit_code=1, eta_seconds=None)


def headline(values: Mapping[str, float]) -> dict[str, float]:
    """The few figures by which people follow a run."""
    group = next((names for names in SHOWN if any(name in values for name in names)), ())
    return {name: values[name] for name in ("loss", *group) if name in values}
