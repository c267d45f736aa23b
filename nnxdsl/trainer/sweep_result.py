"""The result of a sweep or a search in Python: its runs, the best first, as a table, a frame and a plot."""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.imports import allow_names_in
from nnxdsl.config.launcher import Launcher, Local
from nnxdsl.config.search import Search
from nnxdsl.config.sweep import Direction, Sweep
from nnxdsl.errors import RunError
from nnxdsl.launch.job import import_path
from nnxdsl.runs.frame import frame
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_list import last_metrics
from nnxdsl.sweep.drive import drive
from nnxdsl.sweep.plot import plot
from nnxdsl.sweep.results import Row, differing_paths
from nnxdsl.sweep.sweep import SweepDirectory
from nnxdsl.terminal import html
from nnxdsl.terminal.display import number
from nnxdsl.terminal.notebook import open_display
from nnxdsl.trainer.result import Result

STOPPING = "stopping all runs, with everything saved; a second interrupt does not wait for them"


def run_sweep(
    sweep: Sweep | Search,
    home: Path,
    launcher: Launcher | None = None,
    *,
    quiet: bool = False,
    retry_failed: bool = False,
) -> SweepResult:
    """Runs all points of a sweep or a search that have not finished; see `Sweep.run`."""
    allow_names_in(sweep)
    directory = SweepDirectory.open(sweep, home)
    launcher, variables = launcher or Local(), import_path(Path(sys.path[0] if sys.path else "."))
    with open_display(quiet) as display, RunLock(directory.path), contextlib.ExitStack() as stack:
        directory.clear_requests()
        try:
            drive(directory, launcher, display, variables=variables, retry_failed=retry_failed)
        except KeyboardInterrupt:
            display.say(STOPPING)
            stack.callback(directory.clear_requests)
            directory.request_stop()
            drive(directory, launcher, display, variables=variables, cancel=True)
        rows, results = directory.report()
    return SweepResult(directory.path, results["metric"], results["direction"], tuple(rows))


@attrs.frozen(repr=False)
class SweepResult:
    """Results of a sweep or a search, best first; iterating yields the `Result` of each run.

    Attributes:
        directory: `<home>/sweeps/<name>-<8 hex>`, with `results.json` and `results.svg`.
        metric: The metric that sorts the rows.
        direction: Whether it is better small or large.
        rows: A row for each run: its changes, state, step and metric.
    """

    directory: Path
    metric: str
    direction: Direction
    rows: tuple[Row, ...]

    def _run(self, row: Row) -> Path:
        return self.directory.parents[1] / row.run

    def __iter__(self) -> Iterator[Result]:
        return (Result(self._run(row)) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def best(self) -> Result:
        """The run with the best metric.

        Raises:
            RunError: No run has the metric.
        """
        if not self.rows or self.rows[0].value is None:
            raise RunError(f"{self.directory}: no run has {self.metric!r} yet")
        return next(iter(self))

    def frame(self) -> Any:
        """A pandas DataFrame with a row for each run, the best first: what it changes, and all its last metrics.

        Raises:
            RunError: pandas is not installed.
        """
        rows = [
            {"point": row.point, "run": row.run, "state": row.state, "step": row.step}
            | dict(row.changes)
            | last_metrics(self._run(row))
            for row in self.rows
        ]
        return frame(rows, "SweepResult.rows")

    def __repr__(self) -> str:
        finished = sum(row.state == "finished" for row in self.rows)
        top = self.rows[0] if self.rows else None
        best = "" if top is None or top.value is None else f", best={top.run!r}, {self.metric}={number(top.value)}"
        return f"SweepResult({str(self.directory)!r}, {finished} of {len(self.rows)} finished{best})"

    def _repr_html_(self) -> str:
        """A table of the runs and the plot of the metric."""
        paths = differing_paths(self.rows)
        head = ["#", *paths, self.metric, "state", "step", "run"]
        rows = [
            [
                row.point,
                *(render(row.changes[path]) if path in row.changes else None for path in paths),
                row.value,
                row.state,
                row.step,
                row.run,
            ]
            for row in self.rows
        ]
        drawing = plot(self.rows, self.metric, self.direction, self.directory.name)
        source = f"data:image/svg+xml;base64,{base64.b64encode(drawing.encode()).decode()}"
        title = f"{self.directory.name}, the best by {self.metric} first"
        return f'{html.table(head, rows, title=title)}<img alt="{html.text(self.metric)}" src="{source}">'
