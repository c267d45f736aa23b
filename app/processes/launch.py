"""Starts, stops and deletes runs: each is the same command as in a terminal, in a process that outlives the app.

Records are files under `<home>/.app`: `launches/` and `sweeps/` (one directory per start, with its output), `queue/`
(queued runs) and `audit.jsonl` (actions and who requested them). Only the run itself writes its run directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.launch import process as run_process
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import liveness_of, writer_of
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines, read_json, replace, write_json

from ..settings import Settings
from ..store.experiments import stored
from ..store.run_paths import run_path
from ..words import whole
from .jobs import environment
from .presets import Presets

MAX_LAUNCHES = 500
SWEEPS = "sweeps"
"""Directory of the starts of sweeps."""
TAIL = 16_000
READ_SECONDS = 30.0
"""Timeout in seconds of a launch for the child process that reads its recipe."""


@attrs.frozen
class Launch:
    """A start of a run by the app.

    Attributes:
        directory: Directory of its files.
        run: Id of the run.
        process: Its process (pid and start time).
        record: Contents of `launch.json`.
        recipe: Name of the recipe whose file was started; empty for none.
    """

    directory: Path
    run: str
    process: process_info.Process
    record: dict[str, Any]
    recipe: str = ""

    @classmethod
    def read(cls, directory: Path) -> Launch:
        """Reads a record.

        Raises:
            RunError: there is none, or it is damaged.
        """
        record = read_json(directory / "launch.json")
        try:
            who = process_info.Process(int(record["pid"]), record["pid_started"], str(record["host"]))
            return cls(directory, str(record["run"]), who, record, str(record.get("recipe", "")))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{directory / 'launch.json'}: damaged") from error

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

    def output(self) -> str:
        """The last part of its output."""
        return tail(run_process.output_file(self.directory), TAIL)


@attrs.frozen
class Waiting:
    """A queued run; `recipe` as in `Launch`."""

    directory: Path
    run: str
    since: str
    recipe: str = ""


class Launcher:
    """Actions on runs. Processes are identified by their records only."""

    def __init__(self, settings: Settings, presets: Presets | None = None) -> None:
        """Creates a launcher for the app's home."""
        self._settings = settings
        self._presets = presets or Presets(settings.project / "experiments", settings.project)
        self._home, self._own = settings.home, settings.own
        self._lock = threading.RLock()

    # Starting

    def launch(self, experiment: Experiment, who: str = "", recipe: str = "", verb: str = "run") -> Launch:
        """Starts an experiment, or resumes its run, as `nnxdsl run FILE` or `python experiments/RECIPE.py` would.

        The audit log gets the verb, and who requested it.

        Raises:
            RunError: the run is running or has finished, or the recipe cannot be changed into this experiment.
        """
        run = experiment.id
        words = self._presets.command(recipe, experiment, READ_SECONDS) if recipe else ()
        with self._lock:  # a second click is rejected, since it waits for the first one
            self._require_free(run)
            directory = self._new_directory("launches", run)
            self._write(directory, experiment)
            words = words or ("-m", "nnxdsl", "run", str(directory / "experiment.json"))
            return self._start(directory, run, words, who, recipe, verb)

    def resume(self, run: str, who: str = "") -> Launch:
        """Resumes a run as `nnxdsl resume RUN` would, or through its recipe's file if it was started from one.

        Raises:
            RunError: the run is running, has finished, or does not exist.
        """
        found, recipe = RunDirectory(run_path(self._home, run)), self.recipe_of(run)
        experiment = stored(found.path / "experiment.json") if recipe else None
        if experiment is not None:
            # Its file may have been changed or deleted: then the run's own experiment may be enough.
            with contextlib.suppress(NnxdslError):
                return self.launch(experiment, who, recipe, "resume")
        with self._lock:
            self._require_free(run)
            directory = self._new_directory("launches", run)
            return self._start(directory, run, ("-m", "nnxdsl", "resume", str(found.path)), who, recipe, "resume")

    def sweep(self, directory: Path, who: str = "", *, parallel: int = 1, retry_failed: bool = False) -> Launch:
        """Starts the command that drives the sweep of a directory, or resumes it, as `nnxdsl sweep DIRECTORY` would.

        Raises:
            RunError: the app drives it already, or `parallel` is no positive number.
        """
        if parallel < 1:
            raise RunError(f"concurrent runs: expected at least 1, got {parallel}")
        with self._lock:
            newest = self._at_work(directory.name, SWEEPS)
            if newest is not None:
                raise RunError(f"{directory.name} is running already (process {newest.process.pid})")
            record = self._new_directory(SWEEPS, directory.name)
            words = ("-m", "nnxdsl", "sweep", str(directory), "--quiet", "--parallel", str(parallel))
            words += ("--retry-failed",) if retry_failed else ()
            return self._start(record, directory.name, words, who, "", "start sweep")

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

    def _start(self, directory: Path, run: str, words: Sequence[str], who: str, recipe: str, verb: str) -> Launch:
        words, cwd, variables = [*words, "--home", str(self._home)], self._settings.project, environment()
        if recipe and (cwd / "nnxdsl").is_dir():  # a checkout: `-m` finds the package there, a file does not
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(cwd), variables.get("PYTHONPATH"))))
        output = run_process.output_file(directory)
        child = run_process.start(words, output, cwd=cwd, environment=variables, start_new_session=True)
        record = {
            **process_info.environment([sys.executable, *words], cwd),
            "run": run,
            "pid": child.pid,
            "pid_started": process_info.started(child.pid),
            "variables": sorted(variables),
            "asked_by": who,
            "recipe": recipe,
        }
        write_json(directory / "launch.json", record)

        def wait() -> None:  # the exit code is recorded if the app is still running then
            code = child.wait()
            with contextlib.suppress(RunError):
                run_process.write_end(directory, code)

        threading.Thread(target=wait, name=f"wait {run}", daemon=True).start()
        self.audit(verb, run, who)
        for old in self.launches(MAX_LAUNCHES):
            if not old.is_alive:
                shutil.rmtree(old.directory, ignore_errors=True)
        return Launch.read(directory)

    def _require_free(self, run: str) -> None:
        newest = self._at_work(run)
        if newest is not None:
            raise RunError(f"{run} is already starting or running (process {newest.process.pid}); open it")
        directory = self._directory(run)
        if directory is None:
            return
        if directory.liveness() == "finished":
            raise RunError(f"{run} has finished; open it, or change a field (such as the seed) to create another run")
        if _is_written(directory):
            raise RunError(f"{run} is already running (process {directory.status().get('pid')}); open it")

    def _directory(self, run: str) -> RunDirectory | None:
        path = run_path(self._home, run)
        return RunDirectory(path) if (path / "run.json").exists() else None

    # Records of starts

    def launches(self, first: int, last: int | None = None) -> list[Launch]:
        """Recorded starts from index `first` to `last`, newest first."""
        found: list[Launch] = []
        for path in self._entries("launches")[::-1][first:last]:
            with contextlib.suppress(RunError):
                found.append(Launch.read(path))
        return found

    def newest(self, run: str, kind: str = "launches") -> Launch | None:
        """Latest start of a run, or of a sweep (`kind=SWEEPS`), by the app; None if there is none."""
        for path in reversed(self._entries(kind)):
            if path.name.partition("-")[2] == run:
                with contextlib.suppress(RunError):
                    return Launch.read(path)
        return None

    def _at_work(self, run: str, kind: str = "launches") -> Launch | None:
        newest = self.newest(run, kind)
        return newest if newest is not None and newest.is_alive else None

    def _entries(self, kind: str) -> list[Path]:
        """Directories of one kind, whose names begin with the time at which they were made, oldest first."""
        place = self._own / kind
        return [place / name for name in sorted(os.listdir(place))] if place.is_dir() else []

    # Stopping

    def stop(self, run: str, who: str = "") -> str:
        """Requests that a run saves a checkpoint and stops after the current step; returns a message.

        Raises:
            RunError: the run is not running.
        """
        directory = self._directory(run)
        if directory is not None and _is_written(directory):
            directory.request_stop()
            self.audit("stop", run, who)
            return "Stop requested: it saves a checkpoint after the current step, then exits."
        newest = self._at_work(run)
        if newest is None:
            raise RunError(f"{run}: nothing of it is at work on this machine")
        # Still preparing data, or training an earlier experiment, which stops and saves too.
        os.kill(newest.process.pid, signal.SIGTERM)
        self.audit("stop", run, who)
        return "Stop requested."

    def kill(self, run: str, who: str = "") -> str:
        """Kills a run's recorded processes; its last checkpoint stays valid.

        Raises:
            RunError: the run is not running on this machine.
        """
        directory, newest = self._directory(run), self._at_work(run)
        writer = writer_of(directory.status()) if directory is not None and _is_written(directory) else None
        pids = {newest.process.pid} if newest is not None else set[int]()
        pids |= {writer.pid} if writer is not None and writer.is_alive() else set()
        if not pids:
            raise RunError(f"{run}: nothing of it is at work on this machine")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:  # its process group includes others, such as the shell that started it
                    os.kill(pid, signal.SIGKILL)
        self.audit("kill", run, who)
        return "Killed. Resume continues from the last checkpoint, or from the beginning if there is none."

    def put_away(self, run: str, who: str = "") -> str:
        """Moves a run that is not running to `<home>/.trash`.

        Raises:
            RunError: the run is running, or does not exist.
        """
        path = run_path(self._home, run)
        if not (path / "run.json").exists():
            raise RunError(f"{run}: there is no such run")
        if self._at_work(run) is not None:
            raise RunError(f"{run} is running; stop it first")
        trash = self._home / ".trash" / f"{run}-{time.time_ns()}"
        with RunLock(path):
            trash.parent.mkdir(exist_ok=True)
            shutil.move(path, trash)
        self.audit("delete", run, who)
        return f"Moved to {trash}."

    # The queue

    def enqueue(self, experiment: Experiment, who: str = "", recipe: str = "") -> None:
        """Adds an experiment to the queue; arguments as in `launch`.

        Raises:
            RunError: it is queued or running already, or the queue is full.
        """
        waiting = self.waiting()
        if any(one.run == experiment.id for one in waiting):
            raise RunError(f"{experiment.id} is already queued")
        if len(waiting) >= self._settings.limits.queued:
            raise RunError(f"{len(waiting)} runs are queued already; the queue is full")
        self._require_free(experiment.id)
        if recipe:
            self._presets.command(recipe, experiment, READ_SECONDS)
        self._write(self._new_directory("queue", experiment.id), experiment, recipe)
        self.audit("queue", experiment.id, who)

    def waiting(self) -> list[Waiting]:
        """Returns the queued runs, the next one first."""
        found: list[Waiting] = []
        for path in self._entries("queue"):
            text, _, run = path.name.partition("-")
            stamp = whole(text)
            if stamp is not None and (path / "experiment.json").is_file():
                since = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(stamp / 1e9))
                recipe = (path / "recipe").read_text("utf-8") if (path / "recipe").is_file() else ""
                found.append(Waiting(path, run, since, recipe))
        return found

    def move(self, run: str, places: int, who: str = "") -> str:
        """Moves a queued run up (negative) or down by swapping it with its neighbour; returns a message.

        Raises:
            RunError: the run is not queued.
        """
        with self._lock:
            waiting = self.waiting()
            at = next((n for n, one in enumerate(waiting) if one.run == run), None)
            if at is None:
                raise RunError(f"{run} is not queued")
            to = at + (1 if places > 0 else -1)
            if not 0 <= to < len(waiting):
                return f"{run} is already {'last' if places > 0 else 'first'} in the queue."
            moved, other = waiting[at].directory, waiting[to].directory
            # Time stamps in the names define the order; both entries exist between the two renames, so none is lost.
            stamps = [path.name.partition("-")[0] for path in (moved, other)]
            try:
                moved.rename(moved.with_name(f"{stamps[1]}-{run}"))
                other.rename(other.with_name(f"{stamps[0]}-{waiting[to].run}"))
            except OSError as error:  # one of them has been started meanwhile
                raise RunError(f"the queue has changed meanwhile ({error.strerror}); try again") from error
        self.audit("move", run, who)
        return f"{run} is now number {to + 1} in the queue."

    def unqueue(self, run: str, who: str = "") -> str:
        """Removes a run from the queue; returns a message.

        Raises:
            RunError: the run is not queued.
        """
        found = [one for one in self.waiting() if one.run == run]
        if not found:
            raise RunError(f"{run} is not queued")
        for one in found:
            shutil.rmtree(one.directory, ignore_errors=True)
        self.audit("unqueue", run, who)
        return f"{run} was removed from the queue."

    # The audit log

    def audit(self, what: str, run: str, who: str) -> None:
        """Appends an action to the audit log."""
        self._own.mkdir(parents=True, exist_ok=True)
        with self._lock:
            lines = JsonLines(self._own / "audit.jsonl")
            lines.append({"time": process_info.utc(), "action": what, "run": run, "by": who, "app": os.getpid()})
            lines.close()

    def audited(self, run: str) -> list[dict[str, Any]]:
        """Returns the audit log's entries on a run."""
        try:
            return [row for row in JsonLines(self._own / "audit.jsonl").read() if row.get("run") == run]
        except RunError:
            return []

    def _new_directory(self, kind: str, run: str) -> Path:
        directory = self._own / kind / f"{time.time_ns()}-{run}"
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


def _is_written(directory: RunDirectory) -> bool:
    """Whether a process writes a run."""
    return liveness_of(directory.status()) in ("running", "silent")


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
