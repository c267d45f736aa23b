"""Metrics as columns: incremental reading of `metrics.jsonl`, downsampling, smoothing. Independent of pages."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import math
import operator
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from .growing import GrowingFiles

try:
    import orjson

    _loads: Callable[[bytes], Any] = orjson.loads
except ModuleNotFoundError:
    _loads = json.loads

POINTS = 500
TOGETHER = 500
"""Lines parsed per batch, so that they stay in the CPU cache until they are converted to columns."""
STRETCH = 256
"""Values per block of the moving average."""

NOT_DRAWN = ("step", "attempt", "kind")


def _doubles(values: Iterable[float]) -> array[float]:
    return array("d", values)


def _none() -> array[float]:
    return array("d")


@attrs.define
class Columns:
    """The values of one metric.

    Attributes:
        steps: Step of every value.
        values: The values; NaN if not a number.
    """

    steps: array[float] = attrs.field(factory=_none, converter=_doubles)
    values: array[float] = attrs.field(factory=_none, converter=_doubles)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies steps and values into arrays, `[N]` each: a buffer that numpy references cannot grow."""
        return np.array(self.steps), np.array(self.values)


@attrs.define
class Metrics:
    """The content of a `metrics.jsonl`.

    Attributes:
        columns: Metrics by name; those of evaluations begin with `eval/`.
        starts: First step of each attempt.
        last: The last row of training.
    """

    columns: dict[str, Columns] = attrs.Factory(dict)
    starts: dict[int, int] = attrs.Factory(dict)
    last: dict[str, Any] = attrs.Factory(dict)


class Series(GrowingFiles[Metrics]):
    """A cache of the metrics of recently viewed runs."""

    def __init__(self) -> None:
        """Creates an empty cache."""
        super().__init__(Metrics, _add)


def to_csv(columns: Mapping[str, Columns]) -> str:
    """Returns CSV with one row per step and one column per metric; missing and NaN values are empty."""
    by_step: dict[float, dict[str, float]] = {}
    for name, column in columns.items():
        for step, value in zip(column.steps, column.values, strict=True):
            by_step.setdefault(step, {})[name] = value
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", *columns])
    for step in sorted(by_step):
        row = by_step[step]
        values = (row.get(name, math.nan) for name in columns)
        writer.writerow([int(step), *("" if math.isnan(value) else f"{value:.9g}" for value in values)])
    return out.getvalue()


def _add(metrics: Metrics, lines: list[bytes], offset: int) -> None:
    for first in range(0, len(lines), TOGETHER):
        found = _rows(lines[first : first + TOGETHER])
        rows = [row for row in found if isinstance(row, dict) and isinstance(row.get("step"), int)]
        for _, alike in itertools.groupby(rows, key=tuple):
            _take(list(alike), metrics)


def _rows(lines: list[bytes]) -> list[Any]:
    """Parses lines of JSON, in one call if all are valid; None for invalid lines."""
    try:
        found = _loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        found = []
    return found if len(found) == len(lines) else [_row(line) for line in lines]


def _row(line: bytes) -> Any:
    for loads in (_loads, json.loads):  # orjson rejects NaN and Infinity, which Python writes
        try:
            return loads(line)
        except ValueError:
            continue
    return None


def _take(rows: list[dict[str, Any]], metrics: Metrics) -> None:
    """Appends consecutive rows with the same keys to the columns."""
    names = [name for name in rows[0] if name not in NOT_DRAWN]
    if "attempt" in rows[0]:
        for row in rows:
            attempt = row["attempt"]
            if attempt not in metrics.starts and isinstance(attempt, int):
                metrics.starts[attempt] = row["step"]
    training = [row for row in rows if row["kind"] != "evaluation"] if "kind" in rows[0] else rows
    if training:
        metrics.last = training[-1]
    if not names:
        return
    steps, *columns = zip(*map(operator.itemgetter("step", *names), rows), strict=True)
    steps = _doubles(steps)
    for name, values in zip(names, columns, strict=True):
        column = metrics.columns.setdefault(name, Columns())
        column.steps.extend(steps)
        try:
            column.values.extend(_doubles(values))
        except (TypeError, OverflowError):  # not all are numbers
            column.values.extend(map(_number, values))


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.copysign(math.inf, value)


def thinned(steps: np.ndarray, values: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Downsamples a series: keeps the first and last point, and the minimum and maximum of each interval.

    Args:
        steps: `[N]`, ascending.
        values: `[N]`; NaN are dropped.
        points: Maximum number of points.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) <= points:
        return steps, values
    stretches = (points - 2) // 2
    size = -(-len(values) // stretches)
    padded = np.full(size * stretches, np.nan)
    padded[: len(values)] = values
    blocks = padded.reshape(stretches, size)
    blocks = blocks[~np.isnan(blocks).all(axis=1)]
    low, high = np.nanargmin(blocks, axis=1), np.nanargmax(blocks, axis=1)
    first = np.arange(len(blocks)) * size
    chosen = np.unique(np.concatenate([[0, len(values) - 1], first + low, first + high]))
    return steps[chosen], values[chosen]


def not_finite(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Steps at which a series is NaN or infinite, `[M]`."""
    return steps[~np.isfinite(values)]


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Exponential moving average with bias correction; `weight` 0 returns the values unchanged."""
    if weight <= 0 or len(values) == 0:
        return values
    finite = np.isfinite(values)
    given = values[finite]
    # One matrix product per block: weights of each value in later ones, plus the carry of earlier blocks.
    lag = np.arange(STRETCH)
    powers = np.tril(weight ** np.abs(lag[:, None] - lag)) * (1 - weight)
    out, held = np.empty_like(given), 0.0
    for first in range(0, len(given), STRETCH):
        part = given[first : first + STRETCH]
        count = len(part)
        out[first : first + count] = powers[:count, :count] @ part + held * weight ** (lag[:count] + 1)
        held = out[first + count - 1]
    out /= 1 - weight ** np.arange(1.0, len(out) + 1)
    seen = np.cumsum(finite)  # a non-finite value leaves the average unchanged
    return np.where(seen > 0, np.append(math.nan, out)[seen], math.nan)


@attrs.frozen(eq=False)
class Average:
    """A metric averaged over runs, `[N]` each; NaN where no run has a finite value.

    Attributes:
        x: x coordinates, ascending: those of all runs.
        mean: Arithmetic mean over the runs.
        deviation: Sample standard deviation (divided by n - 1); NaN where n < 2.
        least: Minimum over the runs.
        most: Maximum over the runs.
        count: Number of runs, n, from whose first to whose last finite value an x coordinate is.
    """

    x: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    least: np.ndarray
    most: np.ndarray
    count: np.ndarray


def averaged(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Average:
    """Averages series of runs at the x coordinates of all of them.

    A run has no value before its first and after its last x coordinate, and between two neighbours one of which is not
    finite; else values between its own x coordinates are interpolated linearly.

    Args:
        runs: For each run x coordinates `[N_i]`, ascending, and values `[N_i]`.
    """
    x = np.unique(np.concatenate([x for x, _ in runs])) if runs else np.zeros(0)
    values = np.full((len(runs), len(x)), np.nan)
    for row, (own, given) in zip(values, runs, strict=True):
        if len(own):
            finite = np.where(np.isfinite(given), given, np.nan)
            row[:] = np.interp(x, own, finite, left=np.nan, right=np.nan)
            row[np.searchsorted(x, own)] = finite
    there = np.isfinite(values)
    count = there.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(there, values, 0.0).sum(axis=0) / count
        squares = np.where(there, (values - mean) ** 2, 0.0).sum(axis=0)
        deviation = np.sqrt(squares / np.where(count > 1, count - 1, np.nan))
    least = np.where(there, values, np.inf).min(axis=0, initial=np.inf)
    most = np.where(there, values, -np.inf).max(axis=0, initial=-np.inf)
    none = np.where(count > 0, 0.0, np.nan)
    return Average(x, mean, deviation, least + none, most + none, count)


def last_row(path: Path) -> dict[str, Any]:
    """Last row of training metrics in a `metrics.jsonl`, read from its end; empty if there is none."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 16_384))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines[1:] if size > 16_384 else lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("kind") != "evaluation":
            return row
    return {}


SAMPLES = 60
WHOLE_BYTES = 128_000


def sampled(path: Path, name: str) -> np.ndarray:
    """Values of one metric over a `metrics.jsonl`: all of a short file, a sample of lines of a long one."""
    try:
        stat = path.stat()
    except OSError:
        return np.zeros(0)
    return _sampled(path, name, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=2_000)
def _sampled(path: Path, name: str, size: int, _changed: int) -> np.ndarray:
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            lines = file.read().splitlines()
        else:
            lines = []
            for place in range(SAMPLES):
                file.seek(size * place // SAMPLES)
                lines.append(file.read(4_096).partition(b"\n")[2].partition(b"\n")[0])
    found: list[float] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get(name), int | float):
            found.append(float(row[name]))
    return thinned(np.arange(len(found)), np.asarray(found), SAMPLES)[1]
