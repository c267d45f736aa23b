"""The session of a run: its lock, its directory, recovery from a crash, and signals, around one attempt."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import jax

from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.runs.follower import Follower
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory, checked_path
from nnxdsl.runtime import distributed
from nnxdsl.runtime.compile_progress import compile_progress
from nnxdsl.runtime.signals import StopRequest
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.finished import unfinished_reason
from nnxdsl.trainer.trainer import TrainingError

STOPPING = "stopping after this step, with everything saved; a second signal exits at once (the last checkpoint stays)"


class Session:
    """Exclusive use of a run directory; a context manager, which holds the run's lock.

    Attributes:
        path: The run directory.
        finished: The run, if it has finished and is not restarted; else None.
    """

    def __init__(self, experiment: Experiment, home: Path, display: Display, *, restart: bool = False) -> None:
        """Opens nothing before it is entered.

        Args:
            experiment: The experiment of the run.
            home: Directory of all runs.
            display: Shows messages.
            restart: Whether `attempt` moves an existing run directory to `<home>/.trash`.
        """
        self.path = checked_path(home / experiment.id)
        self.finished: RunDirectory | None = None
        self._experiment, self._display, self._restart = experiment, display, restart
        self._stack = contextlib.ExitStack()
        self._lock: object = None
        self._inconsistency: str | None = None

    def __enter__(self) -> Session:
        """Locks a run that exists and has not finished, so that a second process is refused before it reads any data.

        Raises:
            RunError: Another process writes the run, or its directory holds something else.
        """
        if self._restart:
            _require_run_directory(self.path)
        elif existing := RunDirectory.find(self.path, identity=canonical(self._experiment)):
            self._inconsistency = unfinished_reason(existing)
            if self._inconsistency is None:
                self.finished = existing
            else:
                self._acquire_lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def attempt(self, total_steps: int) -> Iterator[Attempt]:
        """An attempt of the run within the block, during which signals request a stop.

        Creates the run directory. If the run is refused before training, a directory that was created here is deleted.
        """
        is_new = self._restart or not self.path.exists()
        directory = self._open_directory()
        if self._lock is None:
            self._acquire_lock()
        self._record_recovery(directory)
        stop_request = self._stack.enter_context(StopRequest(lambda: self._display.say(STOPPING)))
        self._stack.enter_context(compile_progress(self._display))
        try:
            with Attempt(directory, self._display, stop_request, total_steps) as attempt:
                yield attempt
        except TrainingError:
            raise
        except NnxdslError:
            if is_new and distributed.is_process_0():
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _acquire_lock(self) -> None:
        """Takes the run's lock, which process 0 holds for all."""
        lock = distributed.on_process_0(lambda: RunLock(self.path))
        self._lock = self._stack.enter_context(
            lock if distributed.is_process_0() else contextlib.nullcontext(self.path)
        )

    def _open_directory(self) -> RunDirectory:
        """The run's directory, created by process 0 if it is missing, and read by the others."""

        def create() -> RunDirectory:
            if self._restart:
                self._move_to_trash()
            return RunDirectory.create(
                self.path,
                identity=canonical(self._experiment),
                experiment_json=to_dict(self._experiment),
                experiment_py=to_python(self._experiment),
            )

        directory = distributed.on_process_0(create)
        return directory if distributed.is_process_0() else Follower(self.path, jax.process_index())

    def _record_recovery(self, directory: RunDirectory) -> None:
        """Records what a crash left: a status that is wrong, the lock of a process that is gone."""
        if self._inconsistency:
            directory.append_event({"event": self._inconsistency})
            self._display.say(f"warning: {directory.path}: {self._inconsistency}; resuming from there")
        if isinstance(self._lock, RunLock) and self._lock.recovered is not None:
            directory.append_event({"event": "stale lock recovered", "of": self._lock.recovered.process.pid})

    def _move_to_trash(self) -> None:
        if not self.path.exists():
            return
        trash = self.path.parent / ".trash" / f"{self.path.name}-{time.time_ns()}"
        with RunLock(self.path):
            trash.parent.mkdir(exist_ok=True)
            shutil.move(self.path, trash)
        self._display.say(f"moved what {self.path} held to {trash}")


def _require_run_directory(path: Path) -> None:
    """Refuses to move a directory that is no run directory to the trash."""
    is_run = any((path / name).exists() for name in ("run.json", "experiment.json"))
    if path.exists() and not is_run:
        raise RunError(f"{path} is no run directory, so --restart leaves it alone; give another --home")
