"""Starting, stopping and putting away runs: the command that a person types, as a process that outlives the app.

What the app asked for stands in files under `<home>/.app`: `launches/` (one directory for each start, with what it
printed before and beside the run's own log), `queue/` (runs that wait), `audit.jsonl` (who asked for what). The run
directory belongs to the run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import liveness_of, writer_of
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines, read_json, replace, write_json

from .experiments import stored
from .jobs import environment
from .presets import Presets
from .run_paths import run_path
from .settings import Settings
from .words import whole

MAX_LAUNCHES = 500
TAIL = 16_000
READ_SECONDS = 30.0
"""How long a start waits for the child process that reads its recipe."""


@attrs.frozen
class Launch:
    """One start that the app made.

    Attributes:
        directory: Its files.
        run: Id of the run.
        process: Who it is.
        record: All that was written down.
        recipe: Name of the recipe whose file was started; empty for none.
    """

    directory: Path
    run: str
    process: process_info.Process
    record: dict[str, Any]
    recipe: str = ""

    @property
    def began(self) -> float:
        """When, in seconds since 1970."""
        return (whole(self.directory.name.partition("-")[0]) or 0) / 1e9

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs."""
        return self.process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """How it ended, negative for a signal; None while it runs, or where the app was away when it ended."""
        try:
            code = read_json(self.directory / "ended.json").get("exit_code")
        except (RunError, AttributeError):
            return None
        return code if isinstance(code, int) else None

    def output(self) -> str:
        """The end of what it printed."""
        return tail(self.directory / "output.txt", TAIL)


@attrs.frozen
class Waiting:
    """A run that waits for a slot; `recipe` as in `Launch`."""

    directory: Path
    run: str
    since: str
    recipe: str = ""


class Launcher:
    """What a page may do to runs. Knows which processes are ours from their records alone."""

    def __init__(self, settings: Settings, presets: Presets | None = None) -> None:
        """Starts nothing."""
        self._settings = settings
        self._presets = presets or Presets(settings.project / "experiments", settings.project)
        self._home, self._own = settings.home, settings.own
        self._lock = threading.RLock()

    # starting

    def launch(self, experiment: Experiment, who: str = "", recipe: str = "", verb: str = "run") -> Launch:
        """Starts an experiment, or resumes its run, as `nnxdsl run FILE` or `python experiments/RECIPE.py` would.

        Args:
            experiment: What is to run.
            who: Who asked for it, for the audit.
            recipe: The recipe whose file is started, with what differs as `path=value` arguments; empty for none.
            verb: What the audit calls it.

        Raises:
            RunError: its run is at work or has finished, or the recipe cannot become this experiment.
        """
        run = experiment.id
        words = self._presets.command(recipe, experiment, READ_SECONDS) if recipe else ()
        with self._lock:  # a second click waits, and is refused
            self._require_free(run)
            directory = self._new_directory("launches", run)
            self._write(directory, experiment)
            words = words or ("-m", "nnxdsl", "run", str(directory / "experiment.json"))
            return self._start(directory, run, words, who, recipe, verb)

    def resume(self, run: str, who: str = "") -> Launch:
        """Resumes a run as `nnxdsl resume RUN` would, or by its recipe's file where it was started as that.

        Raises:
            RunError: it is at work, has finished, or is not there.
        """
        found = RunDirectory(run_path(self._home, run))
        recipe = self.recipe_of(run)
        experiment = stored(found.path / "experiment.json") if recipe else None
        if experiment is not None:
            try:
                self._presets.command(recipe, experiment, READ_SECONDS)
            except NnxdslError:  # its file has changed or gone: what the run itself holds may be enough
                experiment = None
        if experiment is not None:
            return self.launch(experiment, who, recipe, "resume")
        with self._lock:
            self._require_free(run)
            directory = self._new_directory("launches", run)
            return self._start(directory, run, ("-m", "nnxdsl", "resume", str(found.path)), who, recipe, "resume")

    def recipe_of(self, run: str) -> str:
        """The recipe as whose file a run was started last, by the app or in a terminal; empty for none."""
        newest = self.newest(run)
        if newest is not None and newest.recipe:
            return newest.recipe
        try:
            attempts = RunDirectory(run_path(self._home, run)).attempts()
            last = attempts[-1] if attempts else {}
            return self._presets.named_in(last.get("argv") or (), Path(str(last.get("cwd", "."))))
        except RunError:
            return ""

    def _start(self, directory: Path, run: str, words: tuple[str, ...], who: str, recipe: str, verb: str) -> Launch:
        argv, cwd, variables = (
            [sys.executable, *words, "--home", str(self._home)],
            self._settings.project,
            environment(),
        )
        if recipe and (cwd / "nnxdsl").is_dir():  # a checkout: `-m` finds the package there, a file does not
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(cwd), variables.get("PYTHONPATH"))))
        with (directory / "output.txt").open("ab") as output:
            child = subprocess.Popen(
                argv,
                cwd=cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                close_fds=True,
            )
        record = {
            **process_info.environment(argv, cwd),
            "run": run,
            "pid": child.pid,
            "pid_started": process_info.started(child.pid),
            "variables": sorted(variables),
            "asked_by": who,
            "recipe": recipe,
        }
        write_json(directory / "launch.json", record)
        threading.Thread(target=_wait, args=(child, directory), name=f"wait {run}", daemon=True).start()
        self.audit(verb, run, who)
        self._forget_oldest()
        return _opened(directory)

    def _require_free(self, run: str) -> None:
        path = run_path(self._home, run)
        newest = self.newest(run)
        if newest is not None and newest.is_alive:
            raise RunError(f"{run} is being started or at work already (process {newest.process.pid}); open it")
        if not (path / "run.json").exists():
            return
        directory = RunDirectory(path)
        status = directory.status()
        if directory.liveness() == "finished":
            raise RunError(
                f"{run} has finished; open it, or change a field (the seed, for instance) to make another run"
            )
        if liveness_of(status) in ("running", "silent"):
            raise RunError(f"{run} is at work already (process {status.get('pid')}); open it")

    # what was started

    def launches(self, first: int, last: int | None = None) -> list[Launch]:
        """Starts that the app remembers, newest first: those from `first` up to `last`."""
        place = self._own / "launches"
        names = sorted((entry.name for entry in os.scandir(place)), reverse=True) if place.is_dir() else []
        found: list[Launch] = []
        for name in names[first:last]:
            with contextlib.suppress(RunError):
                found.append(_opened(place / name))
        return found

    def newest(self, run: str) -> Launch | None:
        """The newest start of a run that the app made."""
        place = self._own / "launches"
        names = [entry.name for entry in os.scandir(place)] if place.is_dir() else []
        for name in sorted((name for name in names if name.partition("-")[2] == run), reverse=True):
            with contextlib.suppress(RunError):
                return _opened(place / name)
        return None

    # ending

    def stop(self, run: str, who: str = "") -> str:
        """Asks a run to save and end at the next step; returns a sentence.

        Raises:
            RunError: nothing of it is at work.
        """
        path = run_path(self._home, run)
        if (path / "run.json").exists():
            directory = RunDirectory(path)
            if liveness_of(directory.status()) in ("running", "silent"):
                directory.request_stop()
                self.audit("stop", run, who)
                return "Asked to stop: it saves at the next step and ends."
        newest = self.newest(run)
        if (
            newest is not None and newest.is_alive
        ):  # still reading data, or at an earlier stage, which stops and saves too
            os.kill(newest.process.pid, signal.SIGTERM)
            self.audit("stop", run, who)
            return "Asked to stop."
        raise RunError(f"{run}: nothing of it is at work on this machine")

    def kill(self, run: str, who: str = "") -> str:
        """Ends a run at once; what it saved last is whole. Only processes that runs and launches have recorded.

        Raises:
            RunError: nothing of it is at work on this machine.
        """
        path = run_path(self._home, run)
        writers: list[process_info.Process | None] = []
        if (path / "run.json").exists():
            status = RunDirectory(path).status()
            if liveness_of(status) in ("running", "silent"):
                writers.append(writer_of(status))
        newest = self.newest(run)
        writers.append(newest.process if newest is not None else None)
        alive = [writer for writer in writers if writer is not None and writer.is_alive()]
        if not alive:
            raise RunError(f"{run}: nothing of it is at work on this machine")
        for pid in {writer.pid for writer in alive}:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:  # its group holds others, such as the shell that it was typed in
                    os.kill(pid, signal.SIGKILL)
        self.audit("kill", run, who)
        return "Ended. What it saved is whole, and resume goes on there; where nothing was saved, it begins again."

    def put_away(self, run: str, who: str = "") -> str:
        """Moves a run that is not at work to `<home>/.trash`.

        Raises:
            RunError: it is at work, or is not there.
        """
        path = run_path(self._home, run)
        if not (path / "run.json").exists():
            raise RunError(f"{run}: there is no such run")
        newest = self.newest(run)
        if newest is not None and newest.is_alive:
            raise RunError(f"{run} is at work; stop it first")
        trash = self._home / ".trash" / f"{run}-{time.time_ns()}"
        with RunLock(path):
            trash.parent.mkdir(exist_ok=True)
            shutil.move(path, trash)
        self.audit("delete", run, who)
        return f"Moved to {trash}."

    # waiting

    def enqueue(self, experiment: Experiment, who: str = "", recipe: str = "") -> None:
        """Has an experiment wait for a slot; arguments as in `launch`.

        Raises:
            RunError: it waits or runs already, or too many wait.
        """
        waiting = self.waiting()
        if any(one.run == experiment.id for one in waiting):
            raise RunError(f"{experiment.id} waits already")
        if len(waiting) >= self._settings.limits.queued:
            raise RunError(f"{len(waiting)} runs wait already; the app takes no more")
        self._require_free(experiment.id)
        if recipe:
            self._presets.command(recipe, experiment, READ_SECONDS)
        self._write(self._new_directory("queue", experiment.id), experiment, recipe)
        self.audit("queue", experiment.id, who)

    def waiting(self) -> list[Waiting]:
        """Runs that wait, the next one first."""
        place = self._own / "queue"
        names = sorted(entry.name for entry in os.scandir(place)) if place.is_dir() else []
        found: list[Waiting] = []
        for name in names:
            text, _, run = name.partition("-")
            stamp = whole(text)
            if stamp is not None and (place / name / "experiment.json").is_file():
                recipe = (place / name / "recipe").read_text("utf-8") if (place / name / "recipe").is_file() else ""
                found.append(Waiting(place / name, run, _iso(stamp), recipe))
        return found

    def move(self, run: str, places: int, who: str = "") -> str:
        """Has a run that waits begin earlier (negative) or later: it changes places with its neighbour.

        Raises:
            RunError: it does not wait.
        """
        with self._lock:
            waiting = self.waiting()
            at = next((n for n, one in enumerate(waiting) if one.run == run), None)
            if at is None:
                raise RunError(f"{run} does not wait")
            to = at + (1 if places > 0 else -1)
            if not 0 <= to < len(waiting):
                return f"{run} is {'last' if places > 0 else 'next'} already."
            mine, other = waiting[at].directory, waiting[to].directory
            # Their stamps are their order; between the two renames both have one, and nothing is lost.
            stamps = [path.name.partition("-")[0] for path in (mine, other)]
            try:
                mine.rename(mine.with_name(f"{stamps[1]}-{run}"))
                other.rename(other.with_name(f"{stamps[0]}-{waiting[to].run}"))
            except OSError as error:  # one of them has begun by now
                raise RunError(f"the queue has changed by now: {error.strerror}; look again") from error
        self.audit("move", run, who)
        return f"{run} is number {to + 1} now."

    def unqueue(self, run: str, who: str = "") -> str:
        """Has a run wait no longer.

        Raises:
            RunError: it does not wait.
        """
        found = [one for one in self.waiting() if one.run == run]
        if not found:
            raise RunError(f"{run} does not wait")
        for one in found:
            shutil.rmtree(one.directory, ignore_errors=True)
        self.audit("unqueue", run, who)
        return f"{run} waits no longer."

    # the record

    def audit(self, what: str, run: str, who: str) -> None:
        """Writes down who asked for what."""
        self._own.mkdir(parents=True, exist_ok=True)
        with self._lock:
            lines = JsonLines(self._own / "audit.jsonl")
            lines.append({"time": process_info.utc(), "action": what, "run": run, "by": who, "app": os.getpid()})
            lines.close()

    def audited(self, run: str) -> list[dict[str, Any]]:
        """Actions on a run through the app."""
        try:
            return [row for row in JsonLines(self._own / "audit.jsonl").read() if row.get("run") == run]
        except RunError:
            return []

    def _new_directory(self, kind: str, run: str) -> Path:
        directory = self._own / kind / f"{time.time_ns()}-{run}"
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise RunError(f"{directory}: cannot be made: {error.strerror}") from error
        return directory

    def _write(self, directory: Path, experiment: Experiment, recipe: str = "") -> None:
        if recipe:
            replace(directory / "recipe", recipe.encode())
        replace(directory / "experiment.py", to_python(experiment).encode())
        write_json(directory / "experiment.json", to_dict(experiment))

    def _forget_oldest(self) -> None:
        for old in self.launches(MAX_LAUNCHES):
            if not old.is_alive:
                shutil.rmtree(old.directory, ignore_errors=True)


def tail(path: Path, limit: int) -> str:
    """The end of a text file, whole lines, secrets blotted out; empty if there is none."""
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


def _opened(directory: Path) -> Launch:
    record = read_json(directory / "launch.json")
    try:
        who = process_info.Process(int(record["pid"]), record["pid_started"], str(record["host"]))
        return Launch(directory, str(record["run"]), who, record, str(record.get("recipe", "")))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{directory / 'launch.json'}: damaged") from error


def _wait(child: subprocess.Popen[bytes], directory: Path) -> None:
    """Notes how a child ended, if the app still lives by then; the run itself does not need it."""
    code = child.wait()
    with contextlib.suppress(RunError):
        write_json(directory / "ended.json", {"exit_code": code, "time": process_info.utc()})


def _iso(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(nanoseconds / 1e9))
