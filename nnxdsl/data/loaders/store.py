"""Arrays that grow: in memory, or in files of a directory, from which they are mapped."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


class ArrayStore:
    """Flat arrays by name, written piece by piece. A context manager, which closes the files.

    Args:
        directory: Where a file of raw values is written for each array; None for memory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._files: dict[str, BinaryIO] = {}
        self._dtypes: dict[str, str] = {}

    def __enter__(self) -> ArrayStore:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, name: str, values: npt.NDArray[Any]) -> None:
        """Adds values at the end of an array, whose dtype is that of the first ones.

        Raises:
            OSError: They cannot be written, on a full disk for example.
        """
        if name not in self._files:
            self._files[name] = io.BytesIO() if self._directory is None else (self._directory / name).open("wb")
            self._dtypes[name] = values.dtype.str
        self._files[name].write(np.ascontiguousarray(values, self._dtypes[name]).data)

    def arrays(self) -> Arrays:
        """All arrays so far; those of a directory are mapped, so that only what is used is read."""
        for file in self._files.values():
            file.flush()
        if self._directory is not None:
            return mapped(self._directory, self.shapes())
        files = {name: file for name, file in self._files.items() if isinstance(file, io.BytesIO)}
        return {name: np.frombuffer(file.getvalue(), self._dtypes[name]) for name, file in files.items()}

    def shapes(self) -> dict[str, tuple[str, int]]:
        """The dtype and the number of values of each array."""
        return {
            n: (self._dtypes[n], file.tell() // np.dtype(self._dtypes[n]).itemsize) for n, file in self._files.items()
        }


def mapped(directory: Path, shapes: Mapping[str, tuple[str, int]]) -> Arrays:
    """The arrays that an `ArrayStore` wrote, mapped read-only.

    Raises:
        ValueError: A file is missing or has another size.
        OSError: A file cannot be read.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, (dtype, count) in shapes.items():
        file, size = directory / name, math.prod((count, np.dtype(dtype).itemsize))
        if not file.is_file() or file.stat().st_size != size:
            raise ValueError(f"{file}: expected {size:,} bytes")
        # As a plain array: every slice of a `memmap` object takes microseconds.
        arrays[name] = np.asarray(np.memmap(file, dtype, "r", shape=(count,))) if count else np.zeros(0, dtype)
    return arrays
