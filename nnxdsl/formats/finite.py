"""NaN and infinity in arrays that are read from files: found at the speed of memory, and told by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from nnxdsl.errors import WeightsError

BLOCK_BYTES = 2**19
"""What is looked at together, so that the second look finds it in a core's cache."""
MOST_NAMED = 10
"""Arrays that a message names."""
HINT = "a run that starts from them learns nothing; to load them as they are, set allow_non_finite=True"


def all_finite(array: np.ndarray) -> bool:
    """Whether an array of floats holds neither NaN nor infinity; other dtypes always do."""
    return not any(_holds_non_finite(block) for block in _bits(array))


def count_non_finite(array: np.ndarray) -> int:
    """How many values are NaN or infinite."""
    return sum(int(np.count_nonzero((block & ~_sign(block)) >= infinity)) for block, infinity in _bits(array))


def require_finite(arrays: Mapping[str, Callable[[], np.ndarray]] | Mapping[str, np.ndarray], where: object) -> None:
    """Refuses NaN and infinity.

    Args:
        arrays: by name, or what reads them.
        where: the file or directory that they come from.

    Raises:
        WeightsError: with the names of the arrays that hold some, and how many values of each.
    """
    read = ((name, array() if callable(array) else array) for name, array in arrays.items())
    found = [(name, count, array.size) for name, array in read if (count := count_non_finite(array))]
    if found:
        raise WeightsError(refusal(found, where))


def refusal(found: Iterable[tuple[str, int, int]], where: object) -> str:
    """What is said of arrays that are not finite: name, how many values are not, and of how many."""
    lines = [f"{name}: {count:,} of {size:,} values are NaN or infinite" for name, count, size in found]
    more = [f"and {len(lines) - MOST_NAMED} more"] if len(lines) > MOST_NAMED else []
    arrays = "1 array holds" if len(lines) == 1 else f"{len(lines)} arrays hold"
    return "\n  ".join([f"{where}: {arrays} NaN or infinity; {HINT}:", *lines[:MOST_NAMED], *more])


def _holds_non_finite(found: tuple[np.ndarray, int]) -> bool:
    """Infinity and NaN have the largest exponent: as integers they are the largest of either sign."""
    bits, infinity = found
    positive = bits.view(bits.dtype.str.replace("u", "i")).max(initial=0) >= infinity
    return bool(positive or bits.max(initial=0) >= infinity + int(_sign(bits)))


def _sign(bits: np.ndarray) -> np.unsignedinteger:
    return bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))


def _bits(array: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """An array of floats as unsigned integers, in blocks as it lies in memory; and infinity as such an integer."""
    kind = array.dtype
    if not array.size or kind.itemsize == 1 or not (np.issubdtype(kind, np.floating) or kind.name == "bfloat16"):
        return
    whole = array.view(f"u{kind.itemsize}")
    infinity = int(np.array(np.inf, kind).view(whole.dtype))
    whole = np.atleast_1d(whole.T if whole.ndim > 1 and whole.strides[0] < whole.strides[-1] else whole)
    rows = max(1, BLOCK_BYTES * len(whole) // max(1, whole.nbytes))
    for start in range(0, len(whole), rows):
        yield whole[start : start + rows], infinity
