"""A sweep's directory, and its points as tasks for the driver; knows no engine and no command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs

from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.search import Search, described
from nnxdsl.config.sweep import Direction, Sweep
from nnxdsl.errors import RunError
from nnxdsl.launch.driver import STOP, Settled, Task, last_events
from nnxdsl.launch.outcome import is_alive, standing
from nnxdsl.runs.run_dir import checked_path
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import read_json, replace, write_json
from nnxdsl.sweep.plot import plot
from nnxdsl.sweep.results import Row, figures, ranked, usual_direction, usual_metric
from nnxdsl.terminal.display import Display

DIRECTORY = "sweeps"
"""Under the home of all runs."""

NOT_RUN = "not run"


@attrs.frozen
class SweepDirectory:
    """`<home>/sweeps/<name>-<8 hex>`: what was asked, what happened, what it came to.

    Attributes:
        path: The directory.
        home: The directory of all runs.
        asked: The sweep or search.
    """

    path: Path
    home: Path
    asked: Sweep | Search

    @classmethod
    def open(cls, asked: Sweep | Search, home: Path) -> SweepDirectory:
        """The directory of a sweep, made if it is not there.

        Raises:
            RunError: it cannot be made, or holds another sweep.
        """
        home = home.resolve()
        path = checked_path(home / DIRECTORY / f"{asked.base.name}-{asked.digest[:8]}")
        found = cls(path, home, asked)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path}: cannot be made: {error.strerror}") from error
        if (path / "sweep.json").exists():
            held = read_json(path / "sweep.json")
            digest = cast("dict[str, Any]", held).get("digest") if isinstance(held, dict) else None
            if digest != asked.digest:
                raise RunError(f"{path} holds another sweep; move it away")
        if not (path / "sweep.json").exists() or isinstance(asked, Search):  # whose number of trials may have grown
            write_json(path / "sweep.json", found._described())
        return found

    def ask_to_stop(self) -> None:
        """Has the driver stop all runs and end."""
        write_json(self.path / STOP, {"time": process_info.utc()})

    def forget_requests(self) -> None:
        """Begins with nothing asked."""
        (self.path / STOP).unlink(missing_ok=True)

    def rows(self, points: Sequence[tuple[int, Experiment, Mapping[str, object]]], metric: str) -> list[Row]:
        """How every point stands by now: its number, its experiment and what it changes."""
        events = {row["run"]: row for row in last_events(self.path)}
        return [self._row(number, one, changes, metric, events.get(one.id, {})) for number, one, changes in points]

    def _row(
        self, number: int, one: Experiment, changes: Mapping[str, object], metric: str, event: Mapping[str, Any]
    ) -> Row:
        run = self.home / one.id
        value = figures(run).get(metric)
        if is_alive(run):
            return Row(number, one.id, changes, "running", None, value)
        found = standing(run)
        state, step, error = NOT_RUN, None, None
        if found is not None:
            state, step, error = str(found.became), found.step, found.error
        if state != "finished" and event.get("event") in ("failed", "pruned"):
            state, error = event["event"], event.get("error") or error
        return Row(number, one.id, changes, state, step, value, error)

    def write_results(self, rows: Sequence[Row], metric: str, direction: Direction) -> dict[str, Any]:
        """Writes `results.json` and `results.svg`; returns the former.

        Raises:
            RunError: they cannot be written.
        """
        best = next((row for row in ranked(rows, direction) if row.value is not None), None)
        told = {
            "name": self.asked.base.name,
            "metric": metric,
            "direction": direction,
            "best": None if best is None else best.run,
            "rows": [row.plain() for row in ranked(rows, direction)],
        }
        write_json(self.path / "results.json", told)
        replace(self.path / "results.svg", plot(rows, metric, direction, self.asked.base.name).encode())
        return told

    def _described(self) -> dict[str, Any]:
        told: dict[str, Any] = {"digest": self.asked.digest, "base": to_dict(self.asked.base)}
        if isinstance(self.asked, Search):
            space = {path: described(axis) for path, axis in self.asked.space.items()}
            figure = {"metric": self.asked.metric, "direction": self.asked.direction}
            return {"kind": "search", **told, "space": space, "trials": self.asked.trials, **figure}
        points = [
            {"run": one.id, "changes": {path: render(value) for path, value in point.items()}}
            for one, point in zip(self.asked.experiments, self.asked.points, strict=True)
        ]
        return {"kind": "sweep", **told, "points": points}


class Points:
    """The points of a sweep, one after the other."""

    def __init__(self, sweep: Sweep, display: Display) -> None:
        """Begins with the first."""
        self.total = len(sweep)
        self._display = display
        self._left: Iterator[Task] = iter([Task(one, index) for index, one in enumerate(sweep.experiments)])
        self._done = 0

    def next(self) -> Task | None:
        """The next point; None after the last."""
        return next(self._left, None)

    def is_to_end(self, task: Task) -> bool:
        """Points come to their own end."""
        return False

    def settled(self, task: Task, how: Settled) -> None:
        """Counts it."""
        self._done += 1
        if self._display.console.is_terminal:  # elsewhere the driver's lines say it
            self._display.step(self._done, self.total, {}, {})


def sorted_by(asked: Sweep | Search, metric: str | None, runs: Sequence[Path]) -> tuple[str, Direction]:
    """The figure that counts, and which end of it is the best: as asked, as the sweep says, or the usual one."""
    name = metric or asked.metric or usual_metric(runs)
    direction = asked.direction if name == asked.metric else None
    return name, direction or usual_direction(name)
