"""Tokenized rows, in memory or in mapped files, and batches of static shape."""

from __future__ import annotations

import abc
import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.data import Order
from nnxdsl.data.batch import Batch, PairBatch, SequenceBatch
from nnxdsl.data.loaders.report import Length, Report, joined_report
from nnxdsl.data.packing import Layout, Size
from nnxdsl.data.ragged import Joined, JoinedRagged, Ragged, Selected, SelectedRagged, SomeRows
from nnxdsl.data.sources.digests import combined_digest
from nnxdsl.errors import DataError

Int32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
Reads = Callable[[Rows], Iterable[int]]
"""Chooses those that a process needs among the rows at each position of a batch, -1 for none."""

ROUND_TO = 8
"""Batch lengths are multiples of this, which suits accelerators and keeps the number of compiled shapes small."""


class TokenizedRows(NamedTuple):
    """The accepted rows of a source.

    Attributes:
        parts: Ids by part.
        row_ids: Name of each row.
        report: Counts of accepted, truncated, dropped and unusual rows.
        digest: sha256 hex of the source.
        is_chat: Whether most rows are chats.
        columns: The fields of each row, where rewards read them.
        ids_digest: sha256 hex over all ids, where it is stored.
    """

    parts: dict[str, Ragged]
    row_ids: Sequence[str]
    report: Report
    digest: str
    is_chat: bool
    columns: Sequence[dict[str, Any]] = ()
    ids_digest: str | None = None

    def with_parts(self, parts: dict[str, Ragged], row_ids: Sequence[str] | None = None) -> TokenizedRows:
        """The same with other ids, and other rows if they have other names."""
        return self._replace(parts=parts, row_ids=self.row_ids if row_ids is None else row_ids, ids_digest=None)


class MixtureSource(NamedTuple):
    """A source of a mixture.

    Attributes:
        name: Its name among the metrics.
        share: Of all rows that are trained on.
        rows: Number of its rows.
        order: Of its rows.
    """

    name: str
    share: float
    rows: int
    order: Order


class Dataset(abc.ABC):
    """Tokenized rows of one file.

    Attributes:
        report: Counts of accepted, truncated, dropped and unusual rows.
        digest: sha256 hex of the file.
        row_ids: `file:line` of each accepted row.
        is_chat: Whether most rows are chats, so that prompts for samples get the chat template, too.
        shapes: Lengths of every batch, by axis: the longest row, rounded up to a multiple of 8.
        mixture: The sources whose rows are joined, in their order; empty for a single source.
        masks: Parts that are 0 or 1 for each token.
    """

    masks: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, rows: TokenizedRows) -> None:
        self._parts = rows.parts
        self.report = rows.report
        self.digest = rows.digest
        self.row_ids: Sequence[str] = rows.row_ids
        self.is_chat = rows.is_chat
        self._ids_digest = rows.ids_digest
        self.shapes: dict[str, int] = self._shapes()
        self.mixture: Sequence[MixtureSource] = ()

    def __len__(self) -> int:
        return len(self.row_ids)

    def ids_digest(self) -> str:
        """sha256 hex over the ids of all rows by part, independent of file and template."""
        if self._ids_digest is None:
            self._ids_digest = digest_of(self._parts)
        return self._ids_digest

    def row(self, index: int) -> dict[str, npt.NDArray[np.int32]]:
        """One row's ids by part, unpadded."""
        return {name: part[index] for name, part in self._parts.items()}

    def only(self, rows: Iterable[int]) -> Dataset:
        """The same rows, of which those in `rows` alone are read; batches of others have the right lengths and masks.

        A process makes a batch of all processes with it, of which it needs the rows on its own devices.
        """
        same, wanted_rows = copy.copy(self), frozenset(rows)
        ones = {name: part.sums() if name in self.masks else None for name, part in self._parts.items()}
        same._parts = {name: SomeRows(part, wanted_rows, ones[name]) for name, part in self._parts.items()}
        return same

    def select(self, rows: Rows) -> Dataset:
        """Some of the rows, in the given order; report and digest stay those of the file."""
        same = copy.copy(self)
        same._parts = {name: SelectedRagged(part, rows) for name, part in self._parts.items()}
        same._ids_digest = None
        same.row_ids = Selected(self.row_ids, rows)
        same.shapes = same._shapes()
        lengths = {
            name: Length(total=same._parts[name].total, longest=same._parts[name].longest)
            for name in self.report.lengths
            if name in same._parts
        }
        same.report = attrs.evolve(self.report, accepted=len(rows), lengths=lengths)
        return same

    def joined(self, datasets: Sequence[Dataset]) -> Dataset:
        """The rows of datasets of this class, one dataset after another; this one is the first of them."""
        same, parts = copy.copy(self), [dataset._parts for dataset in datasets]
        same._parts = {name: JoinedRagged([part[name] for part in parts]) for name in self._parts}
        same._ids_digest = None
        same.digest = combined_digest(dataset.digest for dataset in datasets)
        same.row_ids = Joined([dataset.row_ids for dataset in datasets])
        same.report = joined_report([dataset.report for dataset in datasets])
        same.is_chat = 2 * sum(len(dataset) for dataset in datasets if dataset.is_chat) > len(same)
        same.shapes = {axis: max(dataset.shapes[axis] for dataset in datasets) for axis in self.shapes}
        return same

    @abc.abstractmethod
    def _shapes(self) -> dict[str, int]: ...

    @abc.abstractmethod
    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> PairBatch | SequenceBatch:
        """The rows at `indices`, filled up to `size` with copies of the first one of weight 0.

        Copies rather than zeros: the mean over the tokens of an empty row is NaN, and 0 x NaN is NaN.

        Raises:
            ValueError: There is no index, or there are more than `size`.
        """

    def read_batch(self, rows: Rows, size: int, reads: Reads | None) -> PairBatch | SequenceBatch:
        """`batch`, of which only the rows that `reads` chooses are read; None for all."""
        if reads is None:
            return self.batch(rows, size)
        return self.only(reads(np.array(fill_rows(rows, size)[0]))).batch(rows, size)

    def axis_lengths(self) -> dict[str, Int32]:
        """Length of each row by axis of `shapes`, `[rows]` each.

        Raises:
            DataError: This kind of dataset does not implement it.
        """
        raise self._not_implemented("axis_lengths")

    def with_shapes(self, shapes: Mapping[str, int]) -> Dataset:
        """The same rows with batches of other `shapes`; rows in a batch must not be longer."""
        same = copy.copy(self)
        same.shapes = dict(shapes)
        return same

    def packing_lengths(self) -> tuple[Int32, Int32]:
        """Slots of each row in a packed batch, `[rows]`, and its targets, `[rows]`.

        Raises:
            DataError: This kind of dataset cannot be packed.
        """
        raise self._not_implemented("packing_lengths")

    def packed(self, rows: npt.NDArray[np.integer], size: Size, layout: Layout) -> Batch:
        """A packed batch of rows of this dataset; `layout` has the position of each of them.

        Raises:
            DataError: This kind of dataset cannot be packed.
        """
        raise self._not_implemented("packed")

    def _not_implemented(self, method: str) -> DataError:
        return DataError(
            f"batching: {type(self).__name__} of {self.report.source} does not implement {method}(); use "
            f"Batching.Padded()"
        )


def digest_of(parts: Mapping[str, Ragged]) -> str:
    """sha256 hex over all ids by part."""
    digest = hashlib.sha256()
    for name, part in sorted(parts.items()):
        digest.update(f"{name} {len(part)} ".encode())
        part.update(digest)
    return digest.hexdigest()


def round_length(length: int) -> int:
    """The length rounded up to a multiple of `ROUND_TO`."""
    return -(-length // ROUND_TO) * ROUND_TO


def fill_rows(indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Row indices `[size]`, filled up with the first one, and their weights: 0 for the added ones.

    Raises:
        ValueError: There are no indices, or more than `size`.
    """
    rows = [int(index) for index in indices]
    if not 0 < len(rows) <= size:
        raise ValueError(f"a batch of {size} rows takes 1 to {size} indices, got {len(rows)}")
    weight = (np.arange(size) < len(rows)).astype(np.float32)
    return rows + rows[:1] * (size - len(rows)), weight
