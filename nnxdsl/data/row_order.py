"""Rows sorted by 64-bit values piece by piece, so that memory does not grow with their number."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from nnxdsl.errors import DataError

Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.uint64]

PIECE = 2**20
"""Rows that are sorted, read or written at a time, about."""


def sorted_pieces(blocks: Callable[[], Iterable[Values]], rows: int) -> Iterator[tuple[Rows, Values]]:
    """Yields all rows with their values by ascending value, in pieces; those of equal values in the order of rows.

    The blocks are read once for each piece.

    Args:
        blocks: Reads all values from the first, in blocks. They should be evenly distributed, as hashes are.
        rows: Number of values.
    """
    pieces = max(1, -(-rows // PIECE))
    bounds = [piece * 2**64 // pieces for piece in range(pieces)]
    for low, high in zip(bounds, [*bounds[1:], 2**64], strict=True):
        chosen: list[Rows] = []
        chosen_values: list[Values] = []
        begin = 0
        for block in blocks():
            within = np.flatnonzero((block >= np.uint64(low)) & (block <= np.uint64(high - 1)))
            chosen.append(within + begin)
            chosen_values.append(block[within])
            begin += len(block)
        piece, values = np.concatenate(chosen), np.concatenate(chosen_values)
        order = np.argsort(values, kind="stable")
        yield piece[order], values[order]


def joined(pieces: Iterable[Rows], rows: int) -> Rows:
    """[rows] all pieces in one array: in memory, or mapped from an unnamed temporary file if there are more than PIECE.

    Raises:
        DataError: The file cannot be written.
    """
    if rows <= PIECE:
        return np.concatenate(list(pieces))
    try:
        with tempfile.TemporaryFile() as file:
            for piece in pieces:
                file.write(piece.data)
            file.flush()
            return np.asarray(np.memmap(file, np.int64, "r", shape=(rows,)))
    except OSError as error:
        raise DataError(
            f"the order of {rows:,} rows cannot be written to {tempfile.gettempdir()}: {error}; name another directory "
            "in TMPDIR"
        ) from error


def is_permutation(order: Rows) -> bool:
    """Whether an array `[rows]` has each row once."""
    seen = np.zeros(len(order), np.bool_)
    for begin in range(0, len(order), PIECE):
        piece = order[begin : begin + PIECE]
        if piece.min() < 0 or piece.max() >= len(order):
            return False
        seen[piece] = True
    return bool(seen.all())
