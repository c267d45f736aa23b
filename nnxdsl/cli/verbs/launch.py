"""Start a run in separate processes, on this machine or on a cluster, and wait for it.

Ctrl-C leaves the run running; the same command then waits for it again. A killed or preempted run is restarted, up to
the launcher's `retries`. Output is written to HOME/.launch/RUN/output.txt, everything else to the run directory.

exit codes: 0 finished, or stopped on request; 1 failed; 2 rejected; 130 Ctrl-C, the run continues
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
from nnxdsl.launch.driver import STOP, Driver, Task, TaskResult
from nnxdsl.launch.engines import open_engine
from nnxdsl.launch.job import DIRECTORY
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory, checked_path
from nnxdsl.runs.run_list import last_metrics
from nnxdsl.storage.jsonl import write_json
from nnxdsl.storage.process_info import utc
from nnxdsl.terminal.display import Display


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_launching(parser, "FILE-or-RUN")
    parser.add_argument(
        "--detach", action="store_true", help="return after the start; the run is not restarted if it stops"
    )


def run(args: Namespace) -> int:
    """Start a run, or attach to a running one, and wait until it ends; returns the exit code."""
    path = Path(args.target)
    module = load_module(path) if path.suffix == ".py" and path.is_file() else None
    if module is not None:
        args.experiment = experiment_in(module, path)
    experiment = experiment_of(args)
    launcher = launcher_of(args, module)
    refuse_both(args, ("detach", "cancel"))
    if args.detach and isinstance(launcher, Ray) and launcher.address == "local":
        raise RunError("--detach: a cluster with address='local' ends with this command, and the run with it")
    return _launch(experiment, launcher, environment_of(path, module), args)


class _SingleRun:
    """Task source of a single run; displays its progress."""

    total = 1

    def __init__(self, experiment: Experiment, home: Path, display: Display) -> None:
        self._task: Task | None = Task(experiment, 0)
        self._home, self._display = home, display
        self._shown = -1

    def next(self) -> Task | None:
        task, self._task = self._task, None
        return task

    def should_stop(self, task: Task) -> bool:
        """Display progress; never stops the run."""
        with contextlib.suppress(RunError):
            status = RunDirectory(self._home / task.run).status()
            step, total = status.get("step"), status.get("total")
            if step and total and step != self._shown:
                self._shown = step
                self._display.step(step, total, {}, {})
        return False

    def on_end(self, task: Task, result: TaskResult) -> None:
        """No further tasks."""


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
            display.say("stop requested; the command that drives the run stops it and exits")
            return 0
        if not args.cancel:
            (directory / STOP).unlink(missing_ok=True)
        engine = open_engine(launcher)
        stack.callback(engine.close)
        driver = Driver(engine, home, directory, display, variables=variables, retry_failed=True)
        task = Task(experiment, 0)
        if args.detach:
            location = driver.start_detached(task)
            if location:
                display.say(f"{experiment.id} is running: {location}; its output: {directory / 'output.txt'}")
        else:
            source = _SingleRun(experiment, home, display)
            try:
                if args.cancel:
                    display.stage(f"stopping {experiment.id}")
                    driver.cancel(source, [task])
                else:
                    display.stage(experiment.id, experiment.steps)
                    driver.drive(source)
            except KeyboardInterrupt:
                display.close()
                display.say("interrupted; the run continues: the same command waits for it, --cancel stops it")
                return INTERRUPTED
            finally:
                if args.cancel:
                    (directory / STOP).unlink(missing_ok=True)
    end = driver.results.get(experiment.id)
    if args.json:
        row = {"id": experiment.id, "directory": str(home / experiment.id), "state": end.state if end else "started"}
        row |= {"step": end.step, "error": end.error, "figures": last_metrics(home / experiment.id)} if end else {}
        sys.stdout.write(json.dumps(row, indent=2) + "\n")
    return FAILED if end is not None and end.state in ("failed", "preempted") else 0
