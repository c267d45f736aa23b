"""Compares the weights of two models: names, shapes and dtypes of arrays, and differences of their values."""

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

_CHUNK = 1 << 22
"""Number of values that are compared at a time, in float64."""


@attrs.frozen(kw_only=True)
class Difference:
    """The result for one array.

    Attributes:
        path: Our path, or the name in the files if both models are Hub directories.
        verdict: The result.
        shapes: In the first and the second model; None if it is missing.
        dtypes: Likewise, by name.
        largest: The largest absolute difference; None if the shapes differ, NaN if only one of two values is NaN.
        relative: The largest difference relative to the second model's value; infinity if that is zero.
        count: Number of values whose difference exceeds the tolerance.
    """

    path: str
    verdict: Verdict
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    largest: float | None = None
    relative: float | None = None
    count: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with non-finite numbers as strings."""
        fields = attrs.asdict(self)
        for name in ("largest", "relative"):
            value = fields[name]
            fields[name] = value if value is None or math.isfinite(value) else str(value)
        return fields


def compare(
    first: str | Path, second: str | Path, *, rtol: float | None = None, atol: float | None = None
) -> Iterator[Difference]:
    """Compares the weights of two models, with one array of each in memory at a time.

    Without tolerances arrays are the same if shapes, dtypes and all values are equal; with one, if the shapes are equal
    and all values differ by at most `atol + rtol * |value of the second|`, for any dtypes. A NaN equals a NaN.

    Args:
        first: Weights of any format in `open.FORMATS`.
        second: Other weights. Two Hub directories are compared tensor by tensor under their own names, which needs no
            supported family; others under our paths.
        rtol: Relative tolerance; None for 0.
        atol: Absolute tolerance; None for 0.

    Yields:
        A result for each array, in the order of the first model and then of the second.

    Raises:
        RunError: A tolerance is negative, or a path holds no weights.
        WeightsError: Weights cannot be read.
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
        tensors = left if left.kind == "tensors" else right
        raise RunError(f"{tensors.path}: safetensors without a config.json can only be compared with others")
    return left, right


def _compared(path: str, left: Weights, right: Weights, rtol: float, atol: float, *, exact: bool) -> Difference:
    a, b = (side.shapes.get(path) for side in (left, right))
    dtypes = tuple(str(side.dtype(path)) if path in side.shapes else None for side in (left, right))
    fields: dict[str, Any] = {"path": path, "shapes": (a, b), "dtypes": dtypes}
    if a is None or b is None:
        return Difference(**fields, verdict="only in the second" if a is None else "only in the first")
    if a != b:
        return Difference(**fields, verdict="differs")
    largest, relative, count = _values(left.read(path), right.read(path), rtol, atol)
    same = count == 0 and not (exact and dtypes[0] != dtypes[1])
    return Difference(**fields, verdict="same" if same else "differs", largest=largest, relative=relative, count=count)


def _values(left: np.ndarray, right: np.ndarray, rtol: float, atol: float) -> tuple[float, float, int]:
    """Largest absolute and relative difference, and the number of values whose difference exceeds the tolerance."""
    flat = left.reshape(-1), right.reshape(-1)
    largest = relative = 0.0
    count = 0
    for start in range(0, flat[0].size, _CHUNK):
        a, b = (np.asarray(side[start : start + _CHUNK], np.float64) for side in flat)
        # Covers infinities, whose difference is NaN, and values that are NaN on both sides.
        equal = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            difference = np.where(equal, 0.0, np.abs(a - b))
            part = np.where(equal, 0.0, difference / np.abs(b))
        count += int(np.sum(~(difference <= atol + rtol * np.abs(b)) & ~equal))
        largest, relative = _larger(largest, difference), _larger(relative, part)
    return largest, relative, count


def _larger(so_far: float, values: np.ndarray) -> float:
    """The maximum; NaN if any value is NaN."""
    return float(np.max(values, initial=so_far)) if not math.isnan(so_far) else so_far
