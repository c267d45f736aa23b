"""Start a run in processes of its own, here or on a cluster, and wait for it.

Ctrl-C leaves it running, and the same command waits for it again; a run that was killed or preempted is started again,
up to the launcher's `retries`. Its output is HOME/.launch/RUN/output.txt, all else is in the run's directory.

exit codes: 0 finished, or stopped on request; 1 failed; 2 refused; 130 Ctrl-C, and the run continues
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nnxdsl.cli.arguments import experiment_of, refuse_both
from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED
from nnxdsl.cli.launch_arguments import add_launching, environment_of, launcher_of
from nnxdsl.cli.load import experiment_in, load_module
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.launcher import Launcher, Ray
from nnxdsl.errors import RunError
from nnxdsl.launch.driver import STOP, Driver, Settled, Task
from nnxdsl.launch.engines import generated, open_engine
from nnxdsl.launch.job import DIRECTORY
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory, checked_path
from nnxdsl.storage.jsonl import replace, write_json
from nnxdsl.storage.process_info import utc
from nnxdsl.sweep.results import figures
from nnxdsl.terminal.display import Display


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_launching(parser, "FILE-or-RUN")
    parser.add_argument("--detach", action="store_true", help="return once it is started, without restarting it")
    parser.add_argument("--write", metavar="PATH", help="write the file of a cluster's own tool; - prints it")


def run(args: Namespace) -> int:
    """Starts a run and waits for its end, or waits for it where it is running; returns the exit code."""
    path = Path(args.target)
    module = load_module(path) if path.suffix == ".py" and path.is_file() else None
    if module is not None:
        args.experiment = experiment_in(module, path)
    experiment = experiment_of(args)
    launcher = launcher_of(args, module)
    refuse_both(args, ("detach", "cancel"), ("write", "detach"), ("write", "cancel"), ("write", "json"))
    if args.write is not None:
        return _write(generated(launcher, experiment), args.write)
    if args.detach and isinstance(launcher, Ray) and launcher.address == "local":
        raise RunError("--detach: a cluster with address='local' ends with this command, and the run with it")
    return _launch(experiment, launcher, environment_of(path, module), args)


class _SingleRun:
    """One run, whose progress is shown."""

    total = 1

    def __init__(self, experiment: Experiment, home: Path, display: Display) -> None:
        self._task: Task | None = Task(experiment, 0)
        self._home, self._display = home, display
        self._shown = -1

    def next(self) -> Task | None:
        task, self._task = self._task, None
        return task

    def is_to_end(self, task: Task) -> bool:
        """Shows its progress; never stops it."""
        with contextlib.suppress(RunError):
            status = RunDirectory(self._home / task.run).status()
            step, total = status.get("step"), status.get("total")
            if step and total and step != self._shown:
                self._shown = step
                self._display.step(step, total, {}, {})
        return False

    def settled(self, task: Task, how: Settled) -> None:
        """Nothing follows it."""


def _launch(experiment: Experiment, launcher: Launcher, variables: dict[str, str], args: Namespace) -> int:
    home = args.home.resolve()
    directory = checked_path(home / experiment.id).parent / DIRECTORY / experiment.id
    directory.mkdir(parents=True, exist_ok=True)
    if args.cancel:
        write_json(directory / STOP, {"time": utc()})
    with Display(quiet=args.quiet) as display, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunLock(directory))
        except RunError:
            if not args.cancel:
                raise
            display.say("asked the command that drives it to stop it and end")
            return 0
        if not args.cancel:
            (directory / STOP).unlink(missing_ok=True)
        engine = open_engine(launcher)
        stack.callback(engine.close)
        driver = Driver(engine, home, directory, display, variables=variables, retry_failed=True)
        task = Task(experiment, 0)
        if args.detach:
            location = driver.start_and_leave(task)
            if location:
                display.say(f"{experiment.id} is running: {location}; its output: {directory / 'output.txt'}")
        else:
            source = _SingleRun(experiment, home, display)
            display.stage(experiment.id, experiment.steps)
            try:
                if args.cancel:
                    driver.cancel(source, [task])
                else:
                    driver.drive(source)
            except KeyboardInterrupt:
                display.close()
                display.say("interrupted; the run continues: the same command waits for it, --cancel stops it")
                return INTERRUPTED
            finally:
                if args.cancel:
                    (directory / STOP).unlink(missing_ok=True)
    end = driver.settled.get(experiment.id)
    if args.json:
        row = {"id": experiment.id, "directory": str(home / experiment.id), "state": end.state if end else "started"}
        row |= {"step": end.step, "error": end.error, "figures": figures(home / experiment.id)} if end else {}
        sys.stdout.write(json.dumps(row, indent=2) + "\n")
    return FAILED if end is not None and end.state in ("failed", "preempted") else 0


def _write(text: str, path: str) -> int:
    if path == "-":
        sys.stdout.write(text)
    else:
        replace(Path(path), text.encode())
    return 0
