"""Runs the points of a sweep or the trials of a search, and waits for them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from nnxdsl.config.launcher import Launcher
from nnxdsl.config.search import Search
from nnxdsl.errors import RunError
from nnxdsl.launch.driver import Driver, Task
from nnxdsl.launch.engines import UNBOUNDED, open_engine
from nnxdsl.sweep.sweep import Points, SweepDirectory
from nnxdsl.terminal.display import Display


def drive(
    directory: SweepDirectory,
    launcher: Launcher,
    display: Display,
    *,
    variables: Mapping[str, str],
    retry_failed: bool = False,
    cancel: bool = False,
) -> list[str]:
    """Returns the states of the runs, once all have ended or were stopped; the caller has the directory's lock.

    Args:
        directory: The sweep.
        launcher: Where runs are started.
        display: The display.
        variables: Variables added to the environment of the runs.
        retry_failed: Whether runs that failed before are started again.
        cancel: Start nothing; wait for those that `SweepDirectory.request_stop` stops.

    Raises:
        NnxdslError: Nothing can be started.
    """
    sweep, engine = directory.spec, open_engine(launcher)
    try:
        if isinstance(sweep, Search):
            if engine.parallel >= UNBOUNDED:
                raise RunError("a search learns from earlier runs: limit the concurrent ones with --parallel N")
            source = importlib.import_module("nnxdsl.sweep.optuna_search").Trials(
                directory.path, directory.home, sweep, display
            )
        else:
            source = Points(sweep, display)
        driver = Driver(
            engine,
            directory.home,
            directory.path,
            display,
            variables=variables,
            retry_failed=retry_failed,
            is_quiet_about_finished=True,
        )
        display.stage(f"{type(sweep).__name__.lower()} {directory.path.name}", len(sweep), unit="runs")
        if cancel:
            driver.cancel(source, [Task(one, number) for number, one, _ in directory.points()])
        else:
            driver.drive(source)
    finally:
        engine.close()
    return [end.state for end in driver.results.values()]
