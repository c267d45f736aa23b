"""Arrays that are stacked from tensors in files: read when indexed, into memory that devices use without a copy.

A checkpoint holds one transposed matrix per layer; our arrays stack the layers of a kind. Each number is copied once
between the two, by as many threads as there are cores, in about the time of reading the files.
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
"""Rows and columns of a tile when transposing: source and target tile fit into a core's cache."""
BAND_BYTES = 2**24
"""Bytes that a thread copies at a time."""
ALIGNMENT = 64
"""Alignment in bytes: XLA:CPU uses memory with this alignment without copying it."""


@attrs.frozen(eq=False)
class MappedArray:
    """An array whose leading axes stack parts that are read separately.

    Attributes:
        shape: Shape of the whole array.
        dtype: A dtype that can represent the values of all parts.
        parts: Functions that read one part each, in row-major order of the leading axes.
        leading: Number of leading axes that stack parts.
        is_mapped: Whether a part is a view of a file, of which nothing is read before it is used.
        guards: A function for each part that checks values as they are read, and raises; empty for no checks.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Callable[[], np.ndarray], ...]
    leading: int
    is_mapped: bool = True
    guards: tuple[Callable[[np.ndarray], None], ...] = ()

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def layers(self, first: int, stop: int) -> MappedArray:
        """The slice `[first:stop]` along the first axis."""
        each = len(self.parts) // self.shape[0]
        span = slice(first * each, stop * each)
        shape = stop - first, *self.shape[1:]
        return attrs.evolve(self, shape=shape, parts=self.parts[span], guards=self.guards[span])

    def read(
        self, index: Index | None = None, dtype: DTypeLike | None = None, memory: Memory | None = None
    ) -> np.ndarray:
        """Reads a slice of the array into new memory, in row-major order.

        Args:
            index: A slice for each axis, without steps; None for the whole array.
            dtype: Dtype of the result; None for `self.dtype`.
            memory: Allocates the result; None for `aligned`.
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
            _for_each(lambda band: _copy(into[0][band], guard(part[band])), _bands(part), out.nbytes, _cores())
        else:
            threads = _cores() if self.is_mapped else 1  # parts that are computed would all be in memory at once
            _for_each(
                lambda number: self._move(into[number], chosen[number], within), range(len(chosen)), out.nbytes, threads
            )
        return out

    def _move(self, into: np.ndarray, number: int, within: Index) -> None:
        _copy(into, self._guard(number)(self._part(number)[within]))

    def _part(self, number: int) -> np.ndarray:
        part = self.parts[number]()
        if part.shape != self.shape[self.leading :]:
            raise ValueError(f"a part has shape {part.shape}, expected {self.shape[self.leading :]}")
        return part

    def _guard(self, number: int) -> Callable[[np.ndarray], np.ndarray]:
        """The function that checks values of a part and returns them."""

        def guarded(part: np.ndarray) -> np.ndarray:
            if self.guards:
                self.guards[number](part)
            return part

        return guarded

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Reads the whole array, for numpy; a ValueError if `copy` is False."""
        if copy is False:
            raise ValueError("a stacked array cannot be read without a copy")
        return self.read(dtype=dtype)


def aligned(shape: Sequence[int], dtype: DTypeLike, past: int = 0) -> np.ndarray:
    """Allocates an uninitialized array that starts `past` bytes after a multiple of `ALIGNMENT`."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 2 * ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT + past
    return memory[first : first + size].view(dtype).reshape(shape)


def unaligned(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Allocates an uninitialized array that XLA:CPU has to copy."""
    return aligned(shape, dtype, past=8)


def copied(array: np.ndarray, dtype: DTypeLike, memory: Memory = aligned) -> np.ndarray:
    """A row-major copy in `dtype`."""
    out = memory(array.shape, dtype)
    _copy(out, np.asarray(array))
    return out


def _copy(into: np.ndarray, part: np.ndarray) -> None:
    """Copies an array of any memory layout; a transposed one tile by tile."""
    if part.dtype == into.dtype:
        into, part = as_uints(into), as_uints(part)
    if part.ndim > 2:
        for target, source in zip(into, part, strict=True):
            _copy(target, source)
    elif part.ndim == 2 and part.strides[0] < part.strides[1]:
        for row in range(0, part.shape[0], TILE):
            for column in range(0, part.shape[1], TILE):
                tile = slice(row, row + TILE), slice(column, column + TILE)
                into[tile] = part[tile]
    else:
        into[...] = part


def _bands(part: np.ndarray) -> list[slice]:
    """Row slices of an array of about `BAND_BYTES` each."""
    rows = max(1, BAND_BYTES * part.shape[0] // max(1, part.nbytes))
    return [slice(row, row + rows) for row in range(0, part.shape[0], rows)]


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _for_each(do: Callable[[Any], None], items: Sequence[Any], size: int, threads: int) -> None:
    """Calls `do` for every item, in threads if `size` bytes are worth them."""
    threads = min(len(items), threads)
    if threads < 2 or size < BAND_BYTES:
        for item in items:
            do(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(do, items):
            pass


def as_uints(array: np.ndarray) -> np.ndarray:
    """The same bytes as unsigned integers: numpy copies other dtypes, such as bfloat16, one value at a time."""
    size = array.dtype.itemsize
    return array.view(f"u{size}") if size in (1, 2, 4, 8) else array
