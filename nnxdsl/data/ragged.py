"""Integer rows of unequal length in flat buffers, and padded arrays made from them."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
T = TypeVar("T")

BLOCK = 2**22
"""Values of a buffer that are digested at a time."""
STRIDE = 1024
"""Rows between two whose beginnings are in memory; those between are found by adding up to as many lengths."""


def blocks_of(values: npt.NDArray[Any], size: int = BLOCK) -> Iterator[npt.NDArray[Any]]:
    """The values of an array in blocks of `size`, without a copy."""
    return (values[start : start + size] for start in range(0, len(values), size))


class Ragged:
    """Rows of integers in one buffer. Mapped values and lengths take next to no memory, however many rows there are.

    Args:
        values: [N] all rows, concatenated.
        lengths: [rows] values of each row.
        sums: [rows] sum of each row; None to compute them when they are used.
    """

    def __init__(self, values: npt.NDArray[Any], lengths: Int32, sums: Int32 | None = None) -> None:
        self._values, self._sums = values, sums
        groups = np.add.reduceat(lengths, np.arange(0, len(lengths), STRIDE), dtype=np.int64) if len(lengths) else []
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(groups, dtype=np.int64)])
        self.lengths: Int32 = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Int32:
        """One row, without a copy."""
        row = range(len(self.lengths))[row]
        group = row // STRIDE
        start = int(self._starts[group] + self.lengths[group * STRIDE : row].sum(dtype=np.int64))
        return self._values[start : start + int(self.lengths[row])]

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
        if self._sums is None:
            upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._values, dtype=np.int64)])
            ends = np.cumsum(self.lengths, dtype=np.int64)
            self._sums = (upto[ends] - upto[ends - self.lengths]).astype(np.int32)
        return self._sums

    def update(self, digest: Any) -> None:
        """Feeds all lengths and values to a `hashlib` digest."""
        for block in blocks_of(self.lengths):
            digest.update(block.astype("<i4").tobytes())
        for block in self.blocks():
            digest.update(block.astype("<i4").tobytes())

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """All values, in blocks."""
        return blocks_of(self._values)

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


class SomeRows(Ragged):
    """Some rows of other `Ragged` rows, of which only the lengths are known otherwise; their values are not read.

    Args:
        whole: All rows.
        rows: Those that can be read; others are zeros.
        ones: [rows] number of ones of each row of a mask: as many of the last values of other rows are ones. None if it
            is no mask.
    """

    def __init__(self, whole: Ragged, rows: Iterable[int], ones: Int32 | None = None) -> None:
        self._whole, self._rows, self._ones = whole, frozenset(rows), ones
        self.lengths = whole.lengths

    def __getitem__(self, row: int) -> Int32:
        if row in self._rows:
            return self._whole[row]
        length, ones = self.lengths[row], 0 if self._ones is None else self._ones[row]
        return (np.arange(length) >= length - ones).astype(np.int32)

    @property
    def total(self) -> int:
        """Number of values."""
        return self._whole.total

    def sums(self) -> Int32:
        """[rows] the sum of each row's values."""
        return self._whole.sums()

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """All values, in blocks."""
        return self._whole.blocks()


class SelectedRagged(Ragged):
    """Some rows of other `Ragged` rows, in an order of their own, without a copy.

    Args:
        whole: All rows.
        rows: Which of them.
    """

    def __init__(self, whole: Ragged, rows: npt.NDArray[np.int64]) -> None:
        self._whole, self._rows = whole, rows
        self.lengths = whole.lengths[rows]

    def __getitem__(self, row: int) -> Int32:
        return self._whole[int(self._rows[row])]

    @property
    def total(self) -> int:
        """Number of values."""
        return int(self.lengths.sum(dtype=np.int64))

    def sums(self) -> Int32:
        """[rows] the sum of each row's values."""
        return self._whole.sums()[self._rows]

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """All values, row by row."""
        return (self[row] for row in range(len(self)))


class RaggedBuilder:
    """Collects rows one at a time in the compact form of `Ragged`."""

    def __init__(self) -> None:
        self._values, self._lengths = array("i"), array("i")

    def add(self, row: Iterable[int]) -> None:
        """Appends one row."""
        before = len(self._values)
        self._values.extend(row)
        self._lengths.append(len(self._values) - before)

    def build(self) -> Ragged:
        """All rows so far."""
        return Ragged(np.array(self._values, np.int32), np.array(self._lengths, np.int32))


class JoinedRagged(Ragged):
    """The rows of several buffers, one buffer after another.

    Args:
        parts: The buffers.
    """

    def __init__(self, parts: Sequence[Ragged]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self.lengths = np.concatenate([part.lengths for part in parts])

    def __getitem__(self, row: int) -> Int32:
        part = int(np.searchsorted(self._ends, row, side="right"))
        return self._parts[part][row - (int(self._ends[part - 1]) if part else 0)]

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(part.total for part in self._parts)

    def sums(self) -> Int32:
        """[rows] the sum of each row's values."""
        return np.concatenate([part.sums() for part in self._parts])

    def blocks(self) -> Iterator[npt.NDArray[Any]]:
        """All values, in blocks."""
        return (block for part in self._parts for block in part.blocks())


class Joined(Sequence[T]):
    """Several sequences, one after another.

    Args:
        parts: The sequences.
    """

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._parts)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        part = int(np.searchsorted(self._ends, row, side="right"))
        return self._parts[part][row - (int(self._ends[part - 1]) if part else 0)]


class Selected(Sequence[T]):
    """Some values of a sequence, looked up when they are read.

    Args:
        values: All values.
        rows: Places of those that are selected, in their order.
    """

    def __init__(self, values: Sequence[T], rows: Sequence[int] | npt.NDArray[np.integer]) -> None:
        self._values, self._rows = values, np.asarray(rows, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return self._values[int(self._rows[index])]


class JsonRows(Sequence[dict[str, Any]]):
    """JSON objects, each parsed when it is read.

    Args:
        rows: UTF-8 bytes of each.
    """

    def __init__(self, rows: Ragged) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        text = self._rows[range(len(self))[index]].tobytes().decode("utf-8", "surrogatepass")
        return json.loads(text)
