"""Checks arrays from files for NaN and infinity, at memory bandwidth, and names the arrays that hold some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from nnxdsl.errors import WeightsError

BLOCK_BYTES = 2**19
"""Block size of the check: both passes over a block find it in a core's cache."""
MAX_NAMED = 10
"""Arrays named in one message."""
HINT = "a run that starts from them learns nothing; to load them as they are, set allow_non_finite=True"


def all_finite(array: np.ndarray) -> bool:
    """Whether an array of floats holds neither NaN nor infinity; other dtypes always do."""
    return not any(_holds_non_finite(block) for block in _bits(array))


def count_non_finite(array: np.ndarray) -> int:
    """Number of values that are NaN or infinite."""
    return sum(int(np.count_nonzero((block & ~_sign(block)) >= infinity)) for block, infinity in _bits(array))


def require_finite(arrays: Mapping[str, Callable[[], np.ndarray]] | Mapping[str, np.ndarray], origin: object) -> None:
    """Refuses arrays with NaN or infinity.

    Args:
        arrays: Arrays, or functions that read them, by name.
        origin: The file or directory that they come from, for the message.

    Raises:
        WeightsError: Names the arrays with non-finite values, and the number of them in each.
    """
    read = ((name, array() if callable(array) else array) for name, array in arrays.items())
    counts = [(name, count, array.size) for name, array in read if (count := count_non_finite(array))]
    if counts:
        raise WeightsError(non_finite_message(counts, origin))


def non_finite_message(counts: Iterable[tuple[str, int, int]], origin: object) -> str:
    """The error message for non-finite arrays: name, number of non-finite values, size."""
    lines = [f"{name}: {count:,} of {size:,} values are NaN or infinite" for name, count, size in counts]
    more = [f"and {len(lines) - MAX_NAMED} more"] if len(lines) > MAX_NAMED else []
    arrays = "1 array holds" if len(lines) == 1 else f"{len(lines)} arrays hold"
    return "\n  ".join([f"{origin}: {arrays} NaN or infinity; {HINT}:", *lines[:MAX_NAMED], *more])


def _holds_non_finite(block: tuple[np.ndarray, int]) -> bool:
    """Infinity and NaN have the largest exponent: as integers they are the largest values of either sign."""
    bits, infinity = block
    positive = bits.view(bits.dtype.str.replace("u", "i")).max(initial=0) >= infinity
    return bool(positive or bits.max(initial=0) >= infinity + int(_sign(bits)))


def _sign(bits: np.ndarray) -> np.unsignedinteger:
    return bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))


def _bits(array: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """An array of floats as unsigned integers, in blocks in memory order; and infinity as such an integer."""
    kind = array.dtype
    if not array.size or kind.itemsize == 1 or not (np.issubdtype(kind, np.floating) or kind.name == "bfloat16"):
        return
    whole = array.view(f"u{kind.itemsize}")
    infinity = int(np.array(np.inf, kind).view(whole.dtype))
    whole = np.atleast_1d(whole.T if whole.ndim > 1 and whole.strides[0] < whole.strides[-1] else whole)
    rows = max(1, BLOCK_BYTES * len(whole) // max(1, whole.nbytes))
    for start in range(0, len(whole), rows):
        yield whole[start : start + rows], infinity
