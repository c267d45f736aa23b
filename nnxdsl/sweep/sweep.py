"""A sweep's directory, and its points as tasks for the driver; knows no engine and no command line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.config.experiment import Experiment
from nnxdsl.config.search import Search
from nnxdsl.config.sweep import Direction, Sweep
from nnxdsl.errors import RunError
from nnxdsl.launch.driver import STOP, Task, TaskResult, last_events
from nnxdsl.launch.outcome import is_alive, outcome_from_status
from nnxdsl.runs.run_dir import checked_path
from nnxdsl.runs.run_list import last_metrics
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import read_json, replace, write_json
from nnxdsl.sweep.plot import plot
from nnxdsl.sweep.results import Row, default_direction, default_metric, rank_rows
from nnxdsl.sweep.spec_file import FILE, recorded_digest, spec_to_json
from nnxdsl.terminal.display import Display

DIRECTORY = "sweeps"
"""Under the home of all runs."""

NOT_RUN = "not run"

NumberedPoints = Sequence[tuple[int, Experiment, Mapping[str, object]]]
"""Points: number, experiment and changed fields of the base."""


@attrs.frozen
class SweepDirectory:
    """`<home>/sweeps/<name>-<8 hex>`: the sweep, its events and its results.

    Attributes:
        path: The directory.
        home: The directory of all runs.
        spec: The sweep or search.
    """

    path: Path
    home: Path
    spec: Sweep | Search

    @classmethod
    def open(cls, spec: Sweep | Search, home: Path) -> SweepDirectory:
        """Opens the directory of a sweep, and creates it if it is missing.

        Raises:
            RunError: it cannot be made, or holds another sweep.
        """
        home = home.resolve()
        path = checked_path(home / DIRECTORY / f"{spec.base.name}-{spec.digest[:8]}")
        directory = cls(path, home, spec)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path}: cannot be made: {error.strerror}") from error
        exists = (path / FILE).exists()
        earlier = read_json(path / FILE) if exists else None
        if exists and recorded_digest(earlier) != spec.digest:
            raise RunError(f"{path} holds another sweep; move it away")
        # A search's number of trials may have grown; a sweep may be sorted by another metric.
        content = spec_to_json(spec)
        if earlier != content:
            write_json(path / FILE, content)
        return directory

    def request_stop(self) -> None:
        """Asks the driver to stop all runs and exit."""
        write_json(self.path / STOP, {"time": process_info.utc()})

    def clear_requests(self) -> None:
        """Removes earlier stop requests."""
        (self.path / STOP).unlink(missing_ok=True)

    def points(self) -> NumberedPoints:
        """The points of a sweep, or the trials of a search so far with a valid config."""
        if isinstance(self.spec, Sweep):
            return [(i, one, self.spec.points[i]) for i, one in enumerate(self.spec.experiments)]
        return importlib.import_module("nnxdsl.sweep.optuna_search").valid_trials(self.path, self.spec)

    def rows(self, points: NumberedPoints, metric: str) -> list[Row]:
        """The current state of every point, given as its number, its experiment and its changes."""
        events = {row["run"]: row for row in last_events(self.path)}
        return [self._row(number, one, changes, metric, events.get(one.id, {})) for number, one, changes in points]

    def _row(
        self, number: int, one: Experiment, changes: Mapping[str, object], metric: str, event: Mapping[str, Any]
    ) -> Row:
        run = self.home / one.id
        value = last_metrics(run).get(metric)
        if is_alive(run):
            return Row(number, one.id, changes, "running", None, value)
        outcome = outcome_from_status(run)
        state, step, error = NOT_RUN, None, None
        if outcome is not None:
            state, step, error = str(outcome.state), outcome.step, outcome.error
        if state != "finished" and event.get("event") in ("failed", "pruned"):
            state, error = event["event"], event.get("error") or error
        return Row(number, one.id, changes, state, step, value, error)

    def report(self, metric: str | None = None) -> tuple[list[Row], dict[str, Any]]:
        """The rows of all points and their results, which are written to files, by a metric (None: the default)."""
        points = self.points()
        name, direction = sort_order(self.spec, metric, [self.home / one.id for _, one, _ in points])
        rows = self.rows(points, name)
        return rank_rows(rows, direction), self.write_results(rows, name, direction)

    def write_results(self, rows: Sequence[Row], metric: str, direction: Direction) -> dict[str, Any]:
        """Writes `results.json` and `results.svg`; returns the former.

        Raises:
            RunError: they cannot be written.
        """
        best = next((row for row in rank_rows(rows, direction) if row.value is not None), None)
        results = {
            "name": self.spec.base.name,
            "metric": metric,
            "direction": direction,
            "best": None if best is None else best.run,
            "rows": [row.to_json() for row in rank_rows(rows, direction)],
        }
        write_json(self.path / "results.json", results)
        replace(self.path / "results.svg", plot(rows, metric, direction, self.spec.base.name).encode())
        return results


class Points:
    """Task source: the points of a sweep, in order."""

    def __init__(self, sweep: Sweep, display: Display) -> None:
        """Starts with the first point."""
        self.total = len(sweep)
        self._display = display
        self._left: Iterator[Task] = iter([Task(one, index) for index, one in enumerate(sweep.experiments)])
        self._done = 0

    def next(self) -> Task | None:
        """The next point; None after the last."""
        return next(self._left, None)

    def should_stop(self, task: Task) -> bool:
        """Points are never pruned."""
        return False

    def on_end(self, task: Task, result: TaskResult) -> None:
        """Counts the point and shows the progress."""
        self._done += 1
        self._display.step(self._done, self.total, {}, {})


def sort_order(spec: Sweep | Search, metric: str | None, runs: Sequence[Path]) -> tuple[str, Direction]:
    """The metric to sort results by, and its direction: `metric`, else the sweep's, else the default."""
    name = metric or spec.metric or default_metric(runs)
    direction = spec.direction if name == spec.metric else None
    return name, direction or default_direction(name)
