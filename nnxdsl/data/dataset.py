"""Rows as token arrays in memory, and batches of static shape that are cut from them."""

from __future__ import annotations

import abc
import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nnxdsl.data.batch import Batch, PairBatch, SequenceBatch
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.packing import Layout, Size
from nnxdsl.data.ragged import Ragged
from nnxdsl.errors import DataError

Int32 = npt.NDArray[np.int32]

ROUND_TO = 8
"""Batch lengths are rounded up to a multiple of this, as accelerators like it."""


class TokenizedRows(NamedTuple):
    """All kept rows of a file."""

    parts: dict[str, Ragged]
    row_ids: list[str]
    report: Report
    digest: str
    is_chat: bool
    columns: Sequence[dict[str, Any]] = ()


class Dataset(abc.ABC):
    """Tokenised rows of one file.

    Attributes:
        report: What became of the file's rows.
        digest: sha256 hex over the file's bytes.
        row_ids: `file:line` of each kept row.
        is_chat: Whether the rows are chats, so that prompts for samples belong in the template as well.
        shapes: Lengths of every batch, by axis: longest kept row, rounded up to a multiple of 8.
    """

    def __init__(self, rows: TokenizedRows) -> None:
        self._parts = rows.parts
        self.report = rows.report
        self.digest = rows.digest
        self.row_ids = rows.row_ids
        self.is_chat = rows.is_chat
        self.shapes: dict[str, int] = self._shapes()

    def __len__(self) -> int:
        return len(self.row_ids)

    def ids_digest(self) -> str:
        """sha256 hex over the ids of all rows by part: the same whatever file and template they came from."""
        digest = hashlib.sha256()
        for name, part in sorted(self._parts.items()):
            digest.update(f"{name} {len(part)} ".encode())
            part.update(digest)
        return digest.hexdigest()

    def row(self, index: int) -> dict[str, npt.NDArray[np.int32]]:
        """One row's ids by part, unpadded."""
        return {name: part[index] for name, part in self._parts.items()}

    @abc.abstractmethod
    def _shapes(self) -> dict[str, int]: ...

    @abc.abstractmethod
    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> PairBatch | SequenceBatch:
        """The rows at `indices`, filled up to `size` with copies of the first whose weight is 0.

        Copies rather than zeros: a row of no tokens would turn a mean over its tokens into NaN, and 0 x NaN is NaN.

        Raises:
            ValueError: There is no index, or there are more than `size`.
        """

    def axis_lengths(self) -> dict[str, Int32]:
        """What each row needs of each axis of `shapes`, `[rows]` each.

        Raises:
            DataError: This kind of dataset does not say.
        """
        raise self._unknown("long its rows are")

    def cut_to(self, shapes: Mapping[str, int]) -> Dataset:
        """The same rows, whose batches have other `shapes`; no row of theirs may be longer."""
        same = copy.copy(self)
        same.shapes = dict(shapes)
        return same

    def loads(self) -> tuple[Int32, Int32]:
        """What each row needs in a packed batch: tokens `[rows]`, and of these the targets `[rows]`.

        Raises:
            DataError: This kind of dataset cannot be packed.
        """
        raise self._unknown("it is packed")

    def packed(self, rows: npt.NDArray[np.integer], size: Size, layout: Layout) -> Batch:
        """A packed batch.

        Args:
            rows: Of this dataset.
            size: Of the batch.
            layout: Where each of `rows` lies.

        Raises:
            DataError: This kind of dataset cannot be packed.
        """
        raise self._unknown("it is packed")

    def _unknown(self, what: str) -> DataError:
        return DataError(
            f"batching: {type(self).__name__} of {self.report.source} does not say how {what}; use Batching.Padded()"
        )


def round_length(length: int) -> int:
    """The next multiple of `ROUND_TO` tokens, so that few shapes are compiled."""
    return -(-length // ROUND_TO) * ROUND_TO


def fill_rows(indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Row indices `[size]`, filled up with the first one, and their weights: 0 for those that fill up.

    Raises:
        ValueError: There are no indices, or more than `size`.
    """
    rows = [int(index) for index in indices]
    if not 0 < len(rows) <= size:
        raise ValueError(f"a batch of {size} rows takes 1 to {size} indices, got {len(rows)}")
    weight = (np.arange(size) < len(rows)).astype(np.float32)
    return rows + rows[:1] * (size - len(rows)), weight
