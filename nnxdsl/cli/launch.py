"""What the command `launch` does and prints; its words are parsed in `nnxdsl/cli/launch_args.py`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.launcher import Launcher, Ray
from nnxdsl.errors import RunError
from nnxdsl.launch.cluster_files import generated
from nnxdsl.launch.driver import STOP, Driver, Settled, Task
from nnxdsl.launch.engines import open_engine
from nnxdsl.launch.job import DIRECTORY
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory, checked_path
from nnxdsl.storage.jsonl import replace, write_json
from nnxdsl.storage.process_info import utc
from nnxdsl.sweep.results import figures
from nnxdsl.terminal.display import Display


@attrs.frozen
class LaunchArgs:
    """The flags of the command.

    Attributes:
        launcher: Where the run is started.
        home: Directory of all runs.
        variables: What is added to its environment.
        detach: Return once it is started; nobody starts it again then.
        cancel: Stop it.
        write: Start nothing, write the launcher's file there; "-" prints it.
        as_json: Print for machines.
        quiet: No progress.
    """

    launcher: Launcher
    home: Path
    variables: Mapping[str, str]
    detach: bool = False
    cancel: bool = False
    write: str | None = None
    as_json: bool = False
    quiet: bool = False


class _One:
    """One run, watched while it is at work."""

    total = 1

    def __init__(self, experiment: Experiment, home: Path, display: Display) -> None:
        self._task: Task | None = Task(experiment, 0)
        self._home, self._display = home, display
        self._shown = -1

    def next(self) -> Task | None:
        task, self._task = self._task, None
        return task

    def is_to_end(self, task: Task) -> bool:
        """Shows how far it is; it comes to its own end."""
        with contextlib.suppress(RunError):
            status = RunDirectory(self._home / task.run).status()
            step, total = status.get("step"), status.get("total")
            if step and total and step != self._shown:
                self._shown = step
                self._display.step(step, total, {}, {})
        return False

    def settled(self, task: Task, how: Settled) -> None:
        """There is nothing after it."""


def launch_command(experiment: Experiment, asked: LaunchArgs) -> int:
    """Start a run and see it to its end, or wait for it where it is at work; return the process's exit code.

    0: finished, stopped on request, or started (`detach`). 1: failed, or preempted too often. 130: interrupted; the run
    goes on.
    """
    if asked.write is not None:
        return _write(generated(asked.launcher, experiment), asked.write)
    if asked.detach and isinstance(asked.launcher, Ray) and asked.launcher.address == "local":
        raise RunError("--detach: a cluster with address='local' ends with this command, and the run with it")
    home = asked.home.resolve()
    directory = checked_path(home / experiment.id).parent / DIRECTORY / experiment.id
    directory.mkdir(parents=True, exist_ok=True)
    if asked.cancel:
        write_json(directory / STOP, {"time": utc()})
    with Display(quiet=asked.quiet) as display, contextlib.ExitStack() as held:
        try:
            held.enter_context(RunLock(directory))
        except RunError:
            if not asked.cancel:
                raise
            display.say("asked the command that drives it to stop it and end")
            return 0
        if not asked.cancel:
            (directory / STOP).unlink(missing_ok=True)
        engine = open_engine(asked.launcher)
        held.callback(engine.close)
        driver = Driver(engine, home, directory, display, variables=asked.variables, retry_failed=True)
        task = Task(experiment, 0)
        if asked.detach:
            where = driver.start_and_leave(task)
            if where:
                display.say(f"{experiment.id} is at work: {where}; what it prints: {directory / 'output.txt'}")
        else:
            source = _One(experiment, home, display)
            display.stage(experiment.id, experiment.steps)
            try:
                if asked.cancel:
                    driver.cancel(source, [task])
                else:
                    driver.drive(source)
            except KeyboardInterrupt:
                display.close()
                display.say("interrupted; the run goes on: the same command waits for it, --cancel stops it")
                return INTERRUPTED
            finally:
                if asked.cancel:
                    (directory / STOP).unlink(missing_ok=True)
    how = driver.settled.get(experiment.id)
    if asked.as_json:
        told = {"id": experiment.id, "directory": str(home / experiment.id), "state": how.state if how else "started"}
        told |= {"step": how.step, "error": how.error, "figures": figures(home / experiment.id)} if how else {}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    return FAILED if how is not None and how.state in ("failed", "preempted") else 0


def _write(text: str, place: str) -> int:
    if place == "-":
        sys.stdout.write(text)
    else:
        replace(Path(place), text.encode())
    return 0
