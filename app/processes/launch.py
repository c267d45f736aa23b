"""Starts, stops and deletes runs: each is the same command as in a terminal, in a process that outlives the app.

Records are files under `<home>/.app`: `launches/` and `sweeps/` (one directory per start, with its output), `queue/`
(queued runs) and `audit.jsonl` (actions and who requested them). Only the run itself writes its run directory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import attrs

from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.launch import process as run_process
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status, liveness_of, writer_of
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines, read_json, replace, write_json

from ..client import CLIENT
from ..formatting import whole
from ..settings import Settings
from ..store.experiments import stored
from ..store.own_files import require_no_own_files
from ..store.run_paths import run_path
from .jobs import environment
from .presets import Presets

MAX_LAUNCHES = 500
SWEEPS = "sweeps"  # directory of the starts of sweeps
TRASH = ".trash"  # directory of a home that deleted runs are moved to
TAIL = 16_000
READ_SECONDS = 30.0  # timeout in seconds of a launch for the child process that reads its recipe


@attrs.frozen
class Launch:
    """A start of a run by the app."""

    directory: Path  # of its files
    run: str
    process: process_info.Process
    record: dict[str, Any]  # contents of `launch.json`
    recipe: str  # name of the recipe whose file was started; empty for none

    @classmethod
    def read(cls, directory: Path) -> Launch:
        """Reads a record; raises `RunError` if there is none, or it is damaged."""
        record = read_json(directory / "launch.json")
        process = writer_of(cast(Status, record)) if isinstance(record, dict) else None
        if process is None:
            raise RunError(f"{directory / 'launch.json'}: damaged")
        return cls(directory, _run_of(directory), process, record, str(record.get("recipe", "")))

    @property
    def began(self) -> float:
        """Start time in seconds since 1970."""
        return (whole(self.directory.name.partition("-")[0]) or 0) / 1e9

    @property
    def is_alive(self) -> bool:
        """Whether its process is running."""
        return self.process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs, or if the app was not running when it ended."""
        try:
            code = read_json(run_process.end_file(self.directory)).get("exit_code")
        except (RunError, AttributeError):
            return None
        return code if isinstance(code, int) else None

    @property
    def has_begun(self) -> bool:
        """Whether its run had a directory, which its output then names."""
        begins = rf"(?:starting|resuming) .*\b{re.escape(self.run)}(?: at step \d+)?\s*"
        with contextlib.suppress(OSError), run_process.output_file(self.directory).open(errors="replace") as lines:
            return any(re.fullmatch(begins, line) for line in lines)
        return False

    @property
    def state(self) -> str:
        """State of its run while that has no directory: `starting`, `refused`, or `missing` if it had one."""
        return "missing" if self.has_begun else "starting" if self.is_alive else "refused"

    def output(self) -> str:
        """The last part of its output."""
        return tail(run_process.output_file(self.directory), TAIL)


class Waiting(NamedTuple):
    """A queued run; `recipe` as in `Launch`."""

    directory: Path
    run: str
    recipe: str


class Launcher:
    """Actions on runs. Processes are identified by their records only."""

    def __init__(self, settings: Settings, presets: Presets | None = None) -> None:
        self._settings = settings
        self._presets = presets or Presets(settings.recipes, settings.project)
        self._home, self._app_directory = settings.home, settings.app_directory
        self._lock = threading.RLock()

    # Starting

    def launch(self, experiment: Experiment, recipe: str = "", verb: str = "run") -> Launch:
        """Starts or resumes an experiment's run, as `nnxdsl run FILE` or `python experiments/RECIPE.py` would.

        Raises if it runs or has finished, if the recipe cannot be changed into it, or if it names files of the app.
        """
        require_no_own_files(self._settings, experiment)
        run = experiment.id
        argv = self._presets.command(recipe, experiment, READ_SECONDS) if recipe else ()
        with self._lock:  # a second click is rejected, since it waits for the first one
            self._require_free(run)
            directory = self._new_directory("launches", run)
            self._write(directory, experiment)
            argv = argv or ("-m", "nnxdsl", "run", str(directory / "experiment.json"))
            return self._start(directory, run, argv, recipe, verb)

    def resume(self, run: str) -> Launch:
        """Resumes a run as `nnxdsl resume RUN` would, or through its recipe's file; raises as `launch` does."""
        run_directory, recipe = RunDirectory(run_path(self._home, run)), self.recipe_of(run)
        experiment = stored(run_directory.path / "experiment.json") if recipe else None
        if experiment is not None:
            # Its file may have been changed or deleted: then the run's own experiment may be enough.
            with contextlib.suppress(NnxdslError):
                return self.launch(experiment, recipe, "resume")
        with self._lock:
            self._require_free(run)
            directory = self._new_directory("launches", run)
            return self._start(directory, run, ("-m", "nnxdsl", "resume", str(run_directory.path)), recipe, "resume")

    def sweep(self, directory: Path, *, parallel: int = 1, retry_failed: bool = False) -> Launch:
        """Starts or resumes a sweep as `nnxdsl sweep DIRECTORY` would; raises if the app drives it already."""
        if parallel < 1:
            raise RunError(f"concurrent runs: expected at least 1, got {parallel}")
        with self._lock:
            newest = self._alive(directory.name, SWEEPS)
            if newest is not None:
                raise RunError(f"{directory.name} is running already (process {newest.process.pid})")
            record = self._new_directory(SWEEPS, directory.name)
            argv = ("-m", "nnxdsl", "sweep", str(directory), "--quiet", "--parallel", str(parallel))
            argv += ("--retry-failed",) if retry_failed else ()
            return self._start(record, directory.name, argv, "", "start sweep")

    def recipe_of(self, run: str) -> str:
        """Name of the recipe that started the run's last attempt, in the app or a terminal; empty for none."""
        newest = self.newest(run)
        if newest is not None and newest.recipe:
            return newest.recipe
        try:
            attempts = RunDirectory(run_path(self._home, run)).attempts()
            last = attempts[-1] if attempts else {}
            return self._presets.named_in(last.get("argv") or (), Path(str(last.get("cwd", "."))))
        except RunError:
            return ""

    def _start(self, directory: Path, run: str, argv: Sequence[str], recipe: str, verb: str) -> Launch:
        argv, cwd, variables = [*argv, "--home", str(self._home)], self._settings.project, environment()
        output = run_process.output_file(directory)
        child = run_process.start(argv, output, cwd=cwd, environment=variables, start_new_session=True)
        record = {
            **process_info.environment([sys.executable, *argv], cwd),
            "run": run,
            "pid": child.pid,
            "pid_started": process_info.started(child.pid),
            "variables": sorted(variables),
            "asked_by": CLIENT.get(),
            "recipe": recipe,
        }
        write_json(directory / "launch.json", record)

        def wait() -> None:  # the exit code is recorded if the app is still running then
            code = child.wait()
            with contextlib.suppress(RunError):
                run_process.write_end(directory, code)

        threading.Thread(target=wait, name=f"wait {run}", daemon=True).start()
        self.audit(verb, run)
        for old in itertools.islice(self.launches(), MAX_LAUNCHES, None):
            if not old.is_alive:
                shutil.rmtree(old.directory, ignore_errors=True)
        return Launch.read(directory)

    def _require_free(self, run: str) -> None:
        path, newest = run_path(self._home, run), self._alive(run)
        if newest is not None:
            raise RunError(f"{run} is already starting or running (process {newest.process.pid}); open it")
        if (path / "run.json").exists() and RunDirectory(path).liveness() == "finished":
            raise RunError(f"{run} has finished; open it, or change a field (such as the seed) to create another run")
        if (writer := self._writer(run)) is not None:
            raise RunError(f"{run} is already running (process {writer.pid}); open it")

    def _writer(self, run: str) -> process_info.Process | None:
        """The process that writes a run, on any machine; None if none does."""
        path = run_path(self._home, run)
        status = RunDirectory(path).status() if (path / "run.json").exists() else Status()
        return writer_of(status) if liveness_of(status) in ("running", "silent") else None

    # Records of starts

    def launches(self, run: str | None = None, kind: str = "launches") -> Iterator[Launch]:
        """Recorded starts, newest first: all, or those of a run, or of a sweep (`kind=SWEEPS`)."""
        for path in reversed(self._entries(kind)):
            if run is None or _run_of(path) == run:
                with contextlib.suppress(RunError):
                    yield Launch.read(path)

    def newest(self, run: str, kind: str = "launches") -> Launch | None:
        """Latest start of a run, or of a sweep, by the app; None if there is none."""
        return next(self.launches(run, kind), None)

    def _alive(self, run: str, kind: str = "launches") -> Launch | None:
        newest = self.newest(run, kind)
        return newest if newest is not None and newest.is_alive else None

    def _entries(self, kind: str) -> list[Path]:
        """Directories of one kind, whose names begin with the time at which they were made, oldest first."""
        place = self._app_directory / kind
        return [place / name for name in sorted(os.listdir(place))] if place.is_dir() else []

    # Stopping

    def stop(self, run: str) -> str:
        """Has a run save a checkpoint and stop after the current step; returns a message, raises if it does not run."""
        newest = self._alive(run)
        if self._writer(run) is not None:
            RunDirectory(run_path(self._home, run)).request_stop()
            message = "Stop requested: it saves a checkpoint after the current step, then exits."
        elif newest is not None:
            # Still preparing data, or training an earlier experiment, which stops and saves too.
            os.kill(newest.process.pid, signal.SIGTERM)
            message = "Stop requested."
        else:
            raise RunError(f"{run}: no process of it is running on this machine")
        self.audit("stop", run)
        return message

    def kill(self, run: str) -> str:
        """Kills a run's recorded processes, and raises if there are none here; its last checkpoint stays valid."""
        newest, writer = self._alive(run), self._writer(run)
        processes = {one for one in (newest and newest.process, writer) if one is not None and one.is_alive()}
        if not processes:
            raise RunError(f"{run}: no process of it is running on this machine")
        for pid in (one.pid for one in processes):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:  # its process group includes others, such as the shell that started it
                    os.kill(pid, signal.SIGKILL)
        self.audit("kill", run)
        return "Killed. Resume continues from the last checkpoint, or from the beginning if there is none."

    def trash(self, run: str) -> str:
        """Moves a run to `<home>/.trash`; returns a message, raises if it is running or does not exist."""
        path = run_path(self._home, run)
        if not (path / "run.json").exists():
            raise RunError(f"{run}: there is no such run")
        if self._alive(run) is not None:
            raise RunError(f"{run} is running; stop it first")
        target = self._home / TRASH / f"{run}-{time.time_ns()}"
        with RunLock(path):
            target.parent.mkdir(exist_ok=True)
            shutil.move(path, target)
        self.audit("delete", run)
        return f"Moved to {target}."

    # The queue

    def enqueue(self, experiment: Experiment, recipe: str = "") -> None:
        """Adds an experiment to the queue; raises if it is queued or running already, or if the queue is full."""
        waiting = self.waiting()
        if any(one.run == experiment.id for one in waiting):
            raise RunError(f"{experiment.id} is already queued")
        if len(waiting) >= self._settings.limits.queued:
            raise RunError(f"{len(waiting)} runs are queued already; the queue is full")
        require_no_own_files(self._settings, experiment)
        self._require_free(experiment.id)
        if recipe:
            self._presets.command(recipe, experiment, READ_SECONDS)
        self._write(self._new_directory("queue", experiment.id), experiment, recipe)
        self.audit("queue", experiment.id)

    def waiting(self) -> list[Waiting]:
        """Returns the queued runs, the next one first."""
        return [
            Waiting(path, _run_of(path), recipe.read_text("utf-8") if (recipe := path / "recipe").is_file() else "")
            for path in self._entries("queue")
            if (path / "experiment.json").is_file()
        ]

    def move(self, run: str, places: int) -> str:
        """Swaps a queued run with the one before (negative) or after it; returns a message, raises if it is none."""
        with self._lock:
            waiting = self.waiting()
            index = next((n for n, one in enumerate(waiting) if one.run == run), None)
            if index is None:
                raise RunError(f"{run} is not queued")
            to = index + (1 if places > 0 else -1)
            if not 0 <= to < len(waiting):
                return f"{run} is already {'last' if places > 0 else 'first'} in the queue."
            # Time stamps in the names define the order; both entries exist between the two renames, so none is lost.
            pair = waiting[index], waiting[to]
            stamps = [one.directory.name.partition("-")[0] for one in pair]
            try:
                for one, stamp in zip(pair, reversed(stamps), strict=True):
                    one.directory.rename(one.directory.with_name(f"{stamp}-{one.run}"))
            except OSError as error:  # one of them has been started meanwhile
                raise RunError(f"the queue has changed meanwhile ({error.strerror}); try again") from error
        self.audit("move", run)
        return f"{run} is now number {to + 1} in the queue."

    def unqueue(self, run: str) -> str:
        """Removes a run from the queue; returns a message, raises if it is not queued."""
        matching = [one for one in self.waiting() if one.run == run]
        if not matching:
            raise RunError(f"{run} is not queued")
        for one in matching:
            shutil.rmtree(one.directory, ignore_errors=True)
        self.audit("unqueue", run)
        return f"{run} was removed from the queue."

    # The audit log

    def audit(self, what: str, run: str) -> None:
        """Appends an action to the audit log."""
        self._app_directory.mkdir(parents=True, exist_ok=True)
        with self._lock:
            lines = JsonLines(self._app_directory / "audit.jsonl")
            lines.append(
                {"time": process_info.utc(), "action": what, "run": run, "by": CLIENT.get(), "app": os.getpid()}
            )
            lines.close()

    def audited(self, run: str) -> list[dict[str, Any]]:
        """Returns the audit log's entries on a run."""
        try:
            return [row for row in JsonLines(self._app_directory / "audit.jsonl").read() if row.get("run") == run]
        except RunError:
            return []

    def _new_directory(self, kind: str, run: str) -> Path:
        directory = self._app_directory / kind / f"{time.time_ns()}-{run}"
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise RunError(f"{directory}: cannot be created: {error.strerror}") from error
        return directory

    def _write(self, directory: Path, experiment: Experiment, recipe: str = "") -> None:
        if recipe:
            replace(directory / "recipe", recipe.encode())
        replace(directory / "experiment.py", to_python(experiment).encode())
        write_json(directory / "experiment.json", to_dict(experiment))


def _run_of(directory: Path) -> str:
    return directory.name.partition("-")[2]


def tail(path: Path, limit: int) -> str:
    """Last lines of a text file with secrets redacted; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError:
        return ""
    if size > limit:
        data = data.partition(b"\n")[2]
    return process_info.redact(data.decode("utf-8", errors="replace"))
