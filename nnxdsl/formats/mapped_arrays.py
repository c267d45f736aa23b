"""Arrays that lie in pieces in files: read where they are indexed, into memory that devices take as it is.

A checkpoint has a matrix a layer, turned over; we have the layers of a kind in one array. Between the two each number
is moved once, by as many threads as there are cores, which is near what reading the files takes.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
from numpy.typing import DTypeLike

Index = tuple[slice, ...]
Memory = Callable[[Sequence[int], DTypeLike], np.ndarray]

TILE = 256
"""Rows and columns that are turned over at a time: what is read and what is written both stay in a core's cache."""
BAND_BYTES = 2**24
"""What a thread copies of an array at a time."""
ALIGNMENT = 64
"""Bytes: XLA on CPUs takes memory that begins at a multiple of it as it lies, and copies all else."""


@attrs.frozen(eq=False)
class MappedArray:
    """An array, some of whose first axes run over pieces that are each read on their own.

    Attributes:
        shape: of the whole.
        dtype: that holds the numbers of all pieces.
        parts: read a piece, in the order of the leading axes, the last of which changes fastest.
        leading: how many axes that is.
        is_mapped: whether a piece costs nothing until it is used: a view of a file.
        guards: for each piece, what looks at the part of it that is read and raises where it must not be used; empty
            for none.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Callable[[], np.ndarray], ...]
    leading: int
    is_mapped: bool = True
    guards: tuple[Callable[[np.ndarray], None], ...] = ()

    @property
    def size(self) -> int:
        """Numbers of the whole."""
        return math.prod(self.shape)

    def layers(self, first: int, stop: int) -> MappedArray:
        """Those of the first axis from one on, up to another."""
        each = len(self.parts) // self.shape[0]
        own = slice(first * each, stop * each)
        shape = stop - first, *self.shape[1:]
        return attrs.evolve(self, shape=shape, parts=self.parts[own], guards=self.guards[own])

    def read(
        self, index: Index | None = None, dtype: DTypeLike | None = None, memory: Memory | None = None
    ) -> np.ndarray:
        """A part of the array, in memory of its own, one row after another.

        Args:
            index: a slice for each axis, without steps; None for all of it.
            dtype: of the result, to which numbers are rounded as they are moved; None for `self.dtype`.
            memory: gives what is written to; None for `aligned`.
        """
        whole = tuple(slice(0, length) for length in self.shape)
        bounds = [each.indices(length)[:2] for each, length in zip(index or whole, self.shape, strict=True)]
        places = itertools.product(*(range(*bound) for bound in bounds[: self.leading]))
        lengths = self.shape[: self.leading]
        chosen = [int(np.ravel_multi_index(place, lengths)) if lengths else 0 for place in places]
        within = tuple(slice(*bound) for bound in bounds[self.leading :])
        out = (memory or aligned)([stop - start for start, stop in bounds], self.dtype if dtype is None else dtype)
        into = out.reshape(len(chosen), *out.shape[self.leading :])
        if len(chosen) == 1 and within:
            part = self._part(chosen[0])[within]
            guard = self._guard(chosen[0])
            _each(lambda band: _copy(into[0][band], guard(part[band])), _bands(part), out.nbytes, _cores())
        else:
            threads = _cores() if self.is_mapped else 1  # pieces that are computed would all lie in memory at a time
            _each(
                lambda number: self._move(into[number], chosen[number], within), range(len(chosen)), out.nbytes, threads
            )
        return out

    def _move(self, into: np.ndarray, number: int, within: Index) -> None:
        _copy(into, self._guard(number)(self._part(number)[within]))

    def _part(self, number: int) -> np.ndarray:
        part = self.parts[number]()
        if part.shape != self.shape[self.leading :]:
            raise ValueError(f"a piece has shape {part.shape}, expected {self.shape[self.leading :]}")
        return part

    def _guard(self, number: int) -> Callable[[np.ndarray], np.ndarray]:
        """What gives a part of a piece back once it has been looked at."""

        def guarded(part: np.ndarray) -> np.ndarray:
            if self.guards:
                self.guards[number](part)
            return part

        return guarded

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """All of it, for numpy; ValueError where no copy is to be made."""
        if copy is False:
            raise ValueError("an array in pieces cannot be had without a copy")
        return self.read(dtype=dtype)


def aligned(shape: Sequence[int], dtype: DTypeLike, past: int = 0) -> np.ndarray:
    """Memory for an array, to which nothing was written; it begins so many bytes past a multiple of `ALIGNMENT`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 2 * ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT + past
    return memory[first : first + size].view(dtype).reshape(shape)


def unaligned(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Memory for an array that a device must not take as it lies."""
    return aligned(shape, dtype, past=8)


def copied(array: np.ndarray, dtype: DTypeLike, memory: Memory = aligned) -> np.ndarray:
    """A copy in `dtype`, one row after another."""
    out = memory(array.shape, dtype)
    _copy(out, np.asarray(array))
    return out


def _copy(into: np.ndarray, part: np.ndarray) -> None:
    """Copies an array that may lie in any order; one that is turned over tile by tile."""
    if part.dtype == into.dtype:
        into, part = plain(into), plain(part)
    if part.ndim > 2:
        for one, of in zip(into, part, strict=True):
            _copy(one, of)
    elif part.ndim == 2 and part.strides[0] < part.strides[1]:
        for row in range(0, part.shape[0], TILE):
            for column in range(0, part.shape[1], TILE):
                tile = slice(row, row + TILE), slice(column, column + TILE)
                into[tile] = part[tile]
    else:
        into[...] = part


def _bands(part: np.ndarray) -> list[slice]:
    """Rows of an array that are copied together."""
    rows = max(1, BAND_BYTES * part.shape[0] // max(1, part.nbytes))
    return [slice(row, row + rows) for row in range(0, part.shape[0], rows)]


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _each(do: Callable[[Any], None], items: Sequence[Any], size: int, threads: int) -> None:
    """Does all of them, beside each other where there is much to move."""
    threads = min(len(items), threads)
    if threads < 2 or size < BAND_BYTES:
        for item in items:
            do(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(do, items):
            pass


def plain(array: np.ndarray) -> np.ndarray:
    """The same bytes as numbers that numpy knows: others, bfloat16 among them, it moves one at a time."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array
