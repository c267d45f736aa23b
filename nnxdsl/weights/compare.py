"""Two models' weights, array by array: which there are, their shapes and dtypes, and how far their values differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from nnxdsl.errors import RunError
from nnxdsl.weights.open import Weights, open_tensors, open_weights

Verdict = Literal["same", "differs", "only in the first", "only in the second"]

_PIECE = 1 << 22
"""Elements that are compared at a time, in float64."""


@attrs.frozen(kw_only=True)
class Difference:
    """One array of either side.

    Attributes:
        path: ours, or the files' own name of it where both are Hub directories.
        verdict: what is true of it.
        shapes: of the first and the second; None where there is none.
        dtypes: likewise, by name.
        largest: the largest absolute difference of two values; None where the shapes differ, NaN where one of two
            values alone is NaN.
        relative: the largest difference as a part of the second's value; infinity where that is zero.
        count: how many values differ by more than is let pass.
    """

    path: str
    verdict: Verdict
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    largest: float | None = None
    relative: float | None = None
    count: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values; what is not finite as text, since JSON has no word for it."""
        found = attrs.asdict(self)
        for name in ("largest", "relative"):
            value = found[name]
            found[name] = value if value is None or math.isfinite(value) else str(value)
        return found


def compare(
    first: str | Path, second: str | Path, *, rtol: float | None = None, atol: float | None = None
) -> Iterator[Difference]:
    """Compares two models' weights, holding one array of each at a time.

    Without tolerances arrays are the same if shape, dtype and every value are; with any, if the shapes are and every
    value of the first is within `atol + rtol * |value of the second|` of it, whatever the dtypes. A NaN equals a NaN.

    Args:
        first: weights of any format that `weights_in.FORMATS` says.
        second: others. Two Hub directories are compared tensor by tensor under their files' names, which needs no
            family; any others under our paths.
        rtol: relative tolerance; None for 0.
        atol: absolute tolerance; None for 0.

    Yields:
        For each array of either, in the first's order and then the second's.

    Raises:
        RunError: a tolerance is below 0, or a side has no weights.
        WeightsError: a side cannot be read.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise RunError(f"{name}: expected a number of at least 0, got {value}")
    left, right = _opened(Path(first), Path(second))
    exact = rtol is None and atol is None
    for path in (*left.shapes, *(path for path in right.shapes if path not in left.shapes)):
        yield _compared(path, left, right, rtol or 0.0, atol or 0.0, exact=exact)


def _opened(first: Path, second: Path) -> tuple[Weights, Weights]:
    as_tensors = open_tensors(first), open_tensors(second)
    if as_tensors[0] is not None and as_tensors[1] is not None:
        return as_tensors[0], as_tensors[1]
    left, right = open_weights(first), open_weights(second)
    if (left.kind == "tensors") != (right.kind == "tensors"):
        named = left if left.kind == "tensors" else right
        raise RunError(f"{named.where}: safetensors without a config.json can only be compared with others")
    return left, right


def _compared(path: str, left: Weights, right: Weights, rtol: float, atol: float, *, exact: bool) -> Difference:
    a, b = (side.shapes.get(path) for side in (left, right))
    dtypes = tuple(str(side.dtype(path)) if path in side.shapes else None for side in (left, right))
    about: dict[str, Any] = {"path": path, "shapes": (a, b), "dtypes": dtypes}
    if a is None or b is None:
        return Difference(**about, verdict="only in the second" if a is None else "only in the first")
    if a != b:
        return Difference(**about, verdict="differs")
    largest, relative, count = _values(left.read(path), right.read(path), rtol, atol)
    same = count == 0 and not (exact and dtypes[0] != dtypes[1])
    return Difference(**about, verdict="same" if same else "differs", largest=largest, relative=relative, count=count)


def _values(left: np.ndarray, right: np.ndarray, rtol: float, atol: float) -> tuple[float, float, int]:
    """Largest absolute and relative difference, and how many values differ by more than is let pass."""
    flat = left.reshape(-1), right.reshape(-1)
    largest = relative = 0.0
    count = 0
    for start in range(0, flat[0].size, _PIECE):
        a, b = (np.asarray(side[start : start + _PIECE], np.float64) for side in flat)
        # Equal covers infinities, whose difference is NaN; and what is NaN on both sides is the same.
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            difference = np.where(equal, 0.0, np.abs(a - b))
            part = np.where(equal, 0.0, difference / np.abs(b))
        count += int(np.sum(~(difference <= atol + rtol * np.abs(b)) & ~equal))
        largest, relative = _larger(largest, difference), _larger(relative, part)
    return largest, relative, count


def _larger(so_far: float, values: np.ndarray) -> float:
    """The larger of both; a NaN is kept, since it is the largest difference of all."""
    return float(np.max(values, initial=so_far)) if not math.isnan(so_far) else so_far
