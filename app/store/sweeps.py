"""Sweeps and searches of a home: their points, with the state and last metrics of each run; new sweeps."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.config.core.codegen import parse_value
from nnxdsl.config.core.imports import require_allowed
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sweep import Sweep, product, zipped
from nnxdsl.errors import Problem, RunError, SpecError
from nnxdsl.storage.jsonl import read_json
from nnxdsl.sweep import results
from nnxdsl.sweep.spec_file import FILE
from nnxdsl.sweep.sweep import DIRECTORY, NOT_RUN, SweepDirectory

from ..settings import Settings
from .index import Index, Row
from .own_files import require_no_own_files
from .run_paths import directory_path
from .series import Series

RESULTS = "results.json"


@attrs.frozen
class Point(results.Row):
    """A point of a sweep, or a trial of a search, whose changes are Python source."""

    row: Row | None = None  # None if it has not run
    metrics: Mapping[str, float] = attrs.Factory(dict)  # the last ones, held-out ones among them


@attrs.frozen
class OpenedSweep:
    """A sweep or search."""

    path: Path
    kind: str  # "sweep" or "search"
    points: Sequence[Point]
    metric: str  # the one that it names itself; empty if it names none
    direction: str  # of that metric; empty if it names none

    @property
    def name(self) -> str:
        """Name of its directory."""
        return self.path.name

    @property
    def metrics(self) -> list[str]:
        """Names of metrics that a point has, the usual ones first."""
        names = sorted({name for point in self.points for name in point.metrics})
        first = [name for name in (self.metric, *results.DEFAULT_METRICS) if name in names]
        return list(dict.fromkeys([*first, *names]))

    def is_minimized(self, metric: str) -> bool:
        """Whether small values of a metric are good."""
        direction = self.direction if metric == self.metric and self.direction else results.default_direction(metric)
        return direction == "minimize"

    def ranked(self, metric: str) -> list[Point]:
        """Points with a finite value of a metric, the best first."""
        finite = [point for point in self.points if math.isfinite(point.metrics.get(metric, math.nan))]
        return sorted(finite, key=lambda point: point.metrics[metric], reverse=not self.is_minimized(metric))

    @property
    def fields(self) -> list[str]:
        """Paths in which points differ."""
        every = list(dict.fromkeys(path for point in self.points for path in point.changes))
        return results.differing_paths(self.points) or every


def names(home: Path) -> list[str]:
    """Names of the sweeps of a home, newest first."""
    try:
        places = [path for path in (home / DIRECTORY).iterdir() if (path / FILE).is_file()]
    except OSError:
        return []
    return [path.name for path in sorted(places, key=lambda path: path.stat().st_mtime, reverse=True)]


def sweeps_by_run(home: Path) -> dict[str, str]:
    """Returns the newest sweep or search of each run of one."""
    sweeps: dict[str, str] = {}
    for name in reversed(names(home)):
        place = home / DIRECTORY / name
        stats = [path.stat() if path.is_file() else None for path in (place / FILE, place / RESULTS)]
        sweeps |= dict.fromkeys(_runs_of(place, *(stat and stat.st_mtime_ns for stat in stats)), name)
    return sweeps


@functools.lru_cache(maxsize=1_000)
def _runs_of(place: Path, *_changed: int | None) -> list[str]:
    """Runs of a sweep; none if its files are damaged."""
    try:
        points = [*(_object(place / FILE).get("points") or ()), *(_object(place / RESULTS).get("rows") or ())]
    except RunError:
        return []
    return [str(point.get("run")) for point in points if isinstance(point, dict)]


def opened(home: Path, index: Index, series: Series, name: str) -> OpenedSweep:
    """Reads a sweep; raises `RunError` if there is none with this name, or if its file is damaged."""
    path = directory_path(home / DIRECTORY, name)
    if not (path / FILE).is_file():
        raise RunError(f"there is no sweep {name[:100]}")
    described = _object(path / FILE)
    ended = [one for one in _object(path / RESULTS).get("rows") or () if isinstance(one, dict)]
    states = {one.get("run"): str(one.get("state")) for one in ended}
    rows = {row.id: row for row in index.rows()}
    points: list[Point] = []
    for number, one in enumerate(described.get("points") or sorted(ended, key=lambda one: one.get("point", 0))):
        row = rows.get(run := str(one.get("run")))
        changes = {str(key): str(value) for key, value in dict(one.get("changes") or {}).items()}
        columns = {} if row is None else series.of(row.path / "metrics.jsonl").columns
        metrics = {metric: column.values[-1] for metric, column in list(columns.items()) if column.values}
        state = states.get(run, NOT_RUN) if row is None else row.state
        points.append(Point(int(one.get("point", number)), run, changes, state, row=row, metrics=metrics))
    metric, direction = described.get("metric"), described.get("direction")
    return OpenedSweep(path, str(described.get("kind")), points, str(metric or ""), str(direction or ""))


def created(settings: Settings, base: Experiment, text: str, *, zipped_values: bool) -> Path:
    """Returns the directory of a new sweep over an experiment, of which nothing is started.

    Each line `path=value, value, ...` is a field. The first values of all fields make a point, then the second ones,
    or else every combination does. Raises if a line or a point is invalid, or names code that is not allowed, or files
    of the app itself.
    """
    axes: dict[str, list[object]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        path, equals, values = (part.strip() for part in line.partition("="))
        if not equals or not path or not values or path in axes:
            raise SpecError([Problem(line[:100], "expected path=value, value, ... with each path once")])
        axes[path] = _values(values)
    if not axes:
        raise SpecError([Problem("fields", "expected at least one line path=value, value, ...")])
    count = len(next(iter(axes.values()))) if zipped_values else math.prod(map(len, axes.values()))
    if count > (limit := settings.limits.queued):
        raise SpecError([Problem("fields", f"make {count:,} points; expected at most {limit:,}")])
    sweep = Sweep(base, zipped(axes) if zipped_values else product(axes))
    for one in sweep:
        require_allowed(one)
        require_no_own_files(settings, one)
    return SweepDirectory.open(sweep, settings.home).path


def _values(text: str) -> list[object]:
    """Values between commas, each as on the command line: a literal, a constructor call, else the text."""
    values = parse_value(f"({text},)")
    return list(values) if isinstance(values, tuple) else [parse_value(one.strip()) for one in text.split(",")]


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one if there is no such file."""
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise RunError(f"{path}: expected a JSON object")
    return value
