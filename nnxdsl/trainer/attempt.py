"""One attempt at a run: its directory, log and heartbeat, and requests to stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.heartbeat import beating
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status
from nnxdsl.runtime import distributed
from nnxdsl.runtime.signals import StopRequest
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.reporter import Reporter
from nnxdsl.trainer.trainer import TrainingError

STOP_FILE = 1
"""Stands for `control/stop` among the numbers of signals: a number of its own, because this signal cannot be caught."""


class Attempt:
    """A run directory in use by this process; a context manager, within which log and heartbeat are written.

    Attributes:
        directory: The run's files, whose lock this process holds.
        display: What people see.
        stop_request: The signals of this process.
        reporter: Log, events and status.
        checkpoints: The run's checkpoints.
        number: Of this attempt, from 1; 0 before it has begun training.
    """

    reporter: Reporter
    checkpoints: Checkpoints

    def __init__(self, directory: RunDirectory, display: Display, stop_request: StopRequest, total_steps: int) -> None:
        """Changes nothing yet.

        Args:
            directory: The run's files.
            display: What people see.
            stop_request: The signals of this process, which are caught already.
            total_steps: Steps of the whole run.
        """
        self.directory, self.display, self.stop_request = directory, display, stop_request
        self.number, self._total_steps = 0, total_steps
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Attempt:
        directory = self.directory
        distributed.on_process_0(directory.require_readable)
        self._status_before = _status_of(directory)
        directory.clear_requests()
        directory.take_over(state="starting", total=self._total_steps, stage="placing weights")
        with contextlib.ExitStack() as stack:
            stack.callback(directory.close)
            self.reporter = stack.enter_context(Reporter(directory, self.display))
            stack.enter_context(beating(directory))
            stack.enter_context(distributed.on_peer_failure(self.reporter.lost))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def before_training(self) -> Iterator[None]:
        """Within the block a refusal leaves the run directory's status as it was."""
        try:
            yield
        except NnxdslError as error:
            self.reporter.log(f"refused: {error}")
            self.directory.restore_status(self._status_before)
            raise
        except BaseException as error:
            self.reporter.failed(error)
            raise

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Within the block checkpoints are written, and an error is recorded as the failure of the run.

        Raises:
            TrainingError: for any NnxdslError.
        """
        try:
            with self.checkpoints:
                yield
        except NnxdslError as error:
            self.reporter.failed(error)
            raise TrainingError(str(error)) from error
        except BaseException as error:
            self.reporter.failed(error)
            raise

    def stop_signal(self) -> int:
        """The signal that requests a stop of this process; `STOP_FILE` for the run directory's file, 0 for none."""
        return self.stop_request.signal or (STOP_FILE if self.directory.stop_requested() else 0)

    def should_stop(self) -> bool:
        """Whether any process has a request to stop; all processes must call it at the same places."""
        return distributed.all_max(self.stop_signal()) != 0


def _status_of(directory: RunDirectory) -> Status:
    try:
        return directory.status()
    except RunError:  # damaged; it is about to be written anew
        return Status(state="queued")
