"""What the command `sweep` does and prints; its words are parsed in `nnxdsl/cli/launch_args.py`."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs
from rich.console import Console

from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.launcher import Launcher
from nnxdsl.config.search import Search
from nnxdsl.config.sweep import Sweep
from nnxdsl.errors import RunError
from nnxdsl.launch.driver import Driver, Task
from nnxdsl.launch.engines import UNBOUNDED, open_engine
from nnxdsl.runs.lock import RunLock
from nnxdsl.sweep.results import ranked, show_rows
from nnxdsl.sweep.sweep import Points, SweepDirectory, sorted_by
from nnxdsl.terminal.display import Display

Numbered = list[tuple[int, Experiment, Mapping[str, object]]]


@attrs.frozen
class SweepArgs:
    """The flags of the command.

    Attributes:
        launcher: Where the runs are started.
        home: Directory of all runs.
        variables: What is added to their environment.
        metric: What the results are sorted by; None for the sweep's own.
        retry_failed: Start again what failed before.
        show: Start nothing, print the results so far.
        cancel: Stop all of its runs.
        as_json: Print for machines.
        quiet: No progress.
    """

    launcher: Launcher
    home: Path
    variables: Mapping[str, str]
    metric: str | None = None
    retry_failed: bool = False
    show: bool = False
    cancel: bool = False
    as_json: bool = False
    quiet: bool = False


def sweep_command(sweep: Sweep | Search, asked: SweepArgs) -> int:
    """Run a sweep or a search, or go on with it; print what it came to, and return the process's exit code.

    0: every run finished, was pruned, or was stopped on request. 1: some failed. 130: interrupted; what was at work
    goes on.
    """
    if asked.retry_failed and isinstance(sweep, Search):
        raise RunError("--retry-failed has no effect on a search, which learnt from the failure; give it more trials")
    directory = SweepDirectory.open(sweep, asked.home)
    if asked.show:
        return _report(directory, asked, [])
    if asked.cancel:
        directory.ask_to_stop()
    with Display(quiet=asked.quiet) as display, contextlib.ExitStack() as held:
        try:
            held.enter_context(RunLock(directory.path))
        except RunError:
            if not asked.cancel:
                raise
            display.say("asked the command that drives it to stop all runs and end")
            return 0
        if not asked.cancel:
            directory.forget_requests()
        try:
            states = _drive(directory, asked, display)
        except KeyboardInterrupt:
            display.close()
            display.say("interrupted; runs at work go on: the same command waits for them, --cancel stops them")
            return INTERRUPTED
        finally:
            if asked.cancel:
                directory.forget_requests()
    return _report(directory, asked, states)


def _drive(directory: SweepDirectory, asked: SweepArgs, display: Display) -> list[str]:
    sweep = directory.asked
    engine = open_engine(asked.launcher)
    try:
        if isinstance(sweep, Search):
            if engine.parallel >= UNBOUNDED:
                raise RunError("a search learns from the runs before: say how many may run at one time, --parallel N")
            source = importlib.import_module("nnxdsl.sweep.optuna_search").Trials(directory, sweep, display)
        else:
            source = Points(sweep, display)
        driver = Driver(
            engine,
            directory.home,
            directory.path,
            display,
            variables=asked.variables,
            retry_failed=asked.retry_failed,
            is_quiet_about_finished=True,
        )
        display.stage(f"{type(sweep).__name__.lower()} {directory.path.name}", len(sweep), unit="runs")
        if asked.cancel:
            driver.cancel(source, [Task(one, number) for number, one, _ in _points(directory)])
        else:
            driver.drive(source)
    finally:
        engine.close()
    return [how.state for how in driver.settled.values()]


def _report(directory: SweepDirectory, asked: SweepArgs, states: list[str]) -> int:
    """Writes the results, prints them, and returns the exit code."""
    points = _points(directory)
    metric, direction = sorted_by(directory.asked, asked.metric, [directory.home / one.id for _, one, _ in points])
    rows = directory.rows(points, metric)
    told = directory.write_results(rows, metric, direction)
    if asked.as_json:
        sys.stdout.write(json.dumps({"directory": str(directory.path), **told}, indent=2) + "\n")
    else:
        console = Console(highlight=False)
        if rows:
            show_rows(ranked(rows, direction), metric, console)
        for row in rows:
            if row.error and row.state == "failed":
                sys.stdout.write(f"{row.run} failed: {row.error.splitlines()[0]}\n")
        place, here = directory.path, Path.cwd()
        shown = place.relative_to(here) if place.is_relative_to(here) else place
        sys.stdout.write(f"{shown}: results.json, results.svg\n")
    return FAILED if any(state in ("failed", "preempted") for state in states) else 0


def _points(directory: SweepDirectory) -> Numbered:
    sweep = directory.asked
    if isinstance(sweep, Sweep):
        return [(i, one, sweep.points[i]) for i, one in enumerate(sweep.experiments)]
    return importlib.import_module("nnxdsl.sweep.optuna_search").tried(directory, sweep)
