"""Metrics as columns: incremental reading of `metrics.jsonl`, downsampling, smoothing. Independent of pages."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pandas as pd

from .growing import GrowingFiles, row_of

POINTS = 500
NOT_DRAWN = ("step", "attempt", "kind")


def _doubles(values: Iterable[float]) -> array[float]:
    return array("d", values)


@attrs.define
class Columns:
    """The values of one metric, NaN if not a number, and the step of each."""

    steps: array[float] = attrs.field(factory=lambda: array("d"), converter=_doubles)
    values: array[float] = attrs.field(factory=lambda: array("d"), converter=_doubles)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies steps and values into arrays, `[N]` each: a buffer that numpy references cannot grow."""
        return np.array(self.steps), np.array(self.values)


@attrs.define
class Metrics:
    """The content of a `metrics.jsonl`."""

    columns: dict[str, Columns] = attrs.Factory(dict)  # by name; those of evaluations begin with `eval/`
    starts: dict[int, int] = attrs.Factory(dict)  # first step of each attempt
    damaged: int = 0  # rows that are no JSON objects with a step


class Series(GrowingFiles[Metrics]):
    """A cache of the metrics of recently viewed runs."""

    def __init__(self) -> None:
        super().__init__(Metrics, _add)


def to_csv(columns: Mapping[str, Columns]) -> str:
    """Returns CSV with one row per step and one column per metric; missing and NaN values are empty."""
    series = {name: pd.Series(column.values, np.array(column.steps, int)) for name, column in columns.items()}
    table = pd.DataFrame({name: one[~one.index.duplicated(keep="last")] for name, one in series.items()})
    return table.sort_index().rename_axis("step").to_csv(float_format="%.9g", lineterminator="\n")


def _add(metrics: Metrics, lines: list[bytes], _offset: int) -> None:
    for row in map(row_of, lines):
        step = row.get("step")
        if not isinstance(step, int):
            metrics.damaged += 1
            continue
        if isinstance(attempt := row.get("attempt"), int):
            metrics.starts.setdefault(attempt, step)
        for name, value in row.items():
            if name not in NOT_DRAWN:
                column = metrics.columns.get(name)
                if column is None:
                    column = metrics.columns[name] = Columns()
                column.steps.append(step)
                column.values.append(value if type(value) is float else _number(value))


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.copysign(math.inf, value)


def thinned(steps: np.ndarray, values: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Downsamples a series `[N]` of ascending steps to at most so many points; NaN are dropped.

    It keeps the first and last point, and the minimum and maximum of each interval.
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
    """Exponential moving average with bias correction, which values that are not finite leave unchanged.

    A `weight` of 0 returns the values themselves.
    """
    if weight <= 0:
        return values
    finite = pd.Series(np.where(np.isfinite(values), values, np.nan))
    return finite.ewm(alpha=1 - weight, ignore_na=True).mean().to_numpy()


def averaged(runs: Sequence[tuple[np.ndarray, np.ndarray]]) -> pd.DataFrame:
    """Returns mean, std (divided by n - 1), min, max and count of runs at the x coordinates of all of them.

    A run, given as x coordinates `[N_i]`, ascending, and values `[N_i]`, has no value before its first and after its
    last x coordinate, and between two neighbours one of which is not finite; else it is interpolated linearly.
    """
    x = np.unique(np.concatenate([x for x, _ in runs])) if runs else np.zeros(0)
    values = np.full((len(x), len(runs)), np.nan)
    for column, (steps, series) in zip(values.T, runs, strict=True):
        if len(steps):
            finite = np.where(np.isfinite(series), series, np.nan)
            column[:] = np.interp(x, steps, finite, left=np.nan, right=np.nan)
            column[np.searchsorted(x, steps)] = finite
    table = pd.DataFrame(values, x)
    return pd.DataFrame({name: table.agg(name, axis=1) for name in ("mean", "std", "min", "max", "count")})


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
    values = [float(value) for line in lines if isinstance(value := row_of(line).get(name), int | float)]
    return thinned(np.arange(len(values)), np.asarray(values), SAMPLES)[1]
