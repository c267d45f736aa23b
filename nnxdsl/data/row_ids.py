"""Names of rows, such as `chats.jsonl:17`, made when they are read: millions of them take 8 bytes each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class RowIds(Sequence[str]):
    """The place of each row: the beginning that the rows of a file share, and the row's number.

    Args:
        places: Beginning of the names of each file's rows, such as `chats.jsonl:`.
        ends: The row after the last one of each file.
        numbers: [rows] line or row number in its file.
    """

    def __init__(self, places: Sequence[str], ends: Sequence[int], numbers: npt.NDArray[np.int64]) -> None:
        self._places, self._ends, self._numbers = tuple(places), np.asarray(ends, np.int64), numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]  # negative indices, and IndexError
        return f"{self._places[int(np.searchsorted(self._ends, row, side='right'))]}{self._numbers[row]}"

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for place, end in zip(self._places, self._ends.tolist(), strict=True):
            yield from (f"{place}{number}" for number in self._numbers[begin:end].tolist())
            begin = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]
