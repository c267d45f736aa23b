"""Integer rows of unequal length in flat buffers, and padded arrays made from them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class Ragged:
    """Rows of int32 in one buffer: 4 bytes per token and 12 per row.

    Args:
        values: [N] all rows, concatenated.
        ends: [rows] end of each row in `values`.
    """

    def __init__(self, values: Int32, ends: npt.NDArray[np.int64]) -> None:
        self._values = values
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
        self.lengths: Int32 = (ends - self._starts).astype(np.int32)  # [rows]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Int32:
        """One row, without a copy."""
        start = self._starts[row]
        return self._values[start : start + self.lengths[row]]

    @property
    def total(self) -> int:
        """Number of values."""
        return len(self._values)

    @property
    def longest(self) -> int:
        """Length of the longest row, 0 without rows."""
        return int(self.lengths.max(initial=0))

    def sums(self) -> Int32:
        """[rows] the sum of each row's values."""
        upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._values, dtype=np.int64)])
        return (upto[self._starts + self.lengths] - upto[self._starts]).astype(np.int32)

    def update(self, digest: Any) -> None:
        """Feeds all lengths and values to a `hashlib` digest."""
        digest.update(self.lengths.astype("<i4").tobytes())
        digest.update(self._values.astype("<i4").tobytes())

    def right_padded(self, rows: Sequence[int], width: int) -> Int32:
        """[len(rows), width]: rows at the left edge, then zeros."""
        out = np.zeros((len(rows), width), np.int32)
        for line, row in zip(out, rows, strict=True):
            line[: self.lengths[row]] = self[row]
        return out

    def left_padded(self, rows: Sequence[int], width: int) -> Int32:
        """[len(rows), width]: zeros, then rows at the right edge."""
        out = np.zeros((len(rows), width), np.int32)
        for line, row in zip(out, rows, strict=True):
            line[width - self.lengths[row] :] = self[row]
        return out


class RaggedBuilder:
    """Collects rows one at a time in the compact form of `Ragged`."""

    def __init__(self) -> None:
        self._values = array("i")
        self._ends = array("q")

    def add(self, row: Iterable[int]) -> None:
        """Appends one row."""
        self._values.extend(row)
        self._ends.append(len(self._values))

    def build(self) -> Ragged:
        """All rows so far."""
        return Ragged(np.array(self._values, np.int32), np.array(self._ends, np.int64))
