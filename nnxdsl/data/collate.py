"""Collators: the rows of a step as a padded, bucketed or packed batch."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.batching import Batching, Bucketed, Packed, Padded
from nnxdsl.data.batch import Batch
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.packing import Packer, places, rounded
from nnxdsl.errors import DataError

Rows = npt.NDArray[np.int64]
Sample = Callable[[], Sequence[Rows]]
"""Returns the rows of several steps of an epoch."""


@attrs.frozen
class Collator(abc.ABC):
    """Makes batches of one dataset."""

    dataset: Dataset

    @abc.abstractmethod
    def batch(self, rows: Rows) -> Batch:
        """The batch of a step's rows."""

    def places(self, rows: Rows) -> Rows:
        """The row at each position of that batch; -1 where there is none."""
        return rows

    def over(self, dataset: Dataset) -> Collator:
        """The same for a dataset with the same rows."""
        return attrs.evolve(self, dataset=dataset)


@functools.singledispatch
def make_collator(batching: Batching, dataset: Dataset, batch_size: int, blocks: int, sample: Sample) -> Collator:
    """The collator of a dataset; other packages register theirs with `@make_collator.register(MyBatching)`.

    `blocks` is their number in a packed batch, whose sizes are chosen for the steps that `sample` returns.

    Raises:
        DataError: The dataset does not support this batching.
    """
    name = type(batching).__name__
    raise DataError(
        f"batching: nothing is registered for {name}; add @nnxdsl.data.collate.make_collator.register({name})"
    )


@attrs.frozen
class _Padded(Collator):
    """Every batch has the length of the longest row."""

    batch_size: int

    def batch(self, rows: Rows) -> Batch:
        return self.dataset.batch(rows, self.batch_size)


@make_collator.register
def _(batching: Padded, dataset: Dataset, batch_size: int, blocks: int, sample: Sample) -> Collator:
    return _Padded(dataset, batch_size)


@attrs.frozen
class _Bucketed(_Padded):
    """Every batch has the smallest of a few lengths that fits its rows."""

    needed: Mapping[str, npt.NDArray[np.int32]]
    buckets: Mapping[str, npt.NDArray[np.int64]]

    def batch(self, rows: Rows) -> Batch:
        shapes = {
            axis: int(lengths[np.searchsorted(lengths, self.needed[axis][rows].max())])
            for axis, lengths in self.buckets.items()
        }
        return self.dataset.with_shapes(shapes).batch(rows, self.batch_size)


@make_collator.register
def _(batching: Bucketed, dataset: Dataset, batch_size: int, blocks: int, sample: Sample) -> Collator:
    needed = dataset.axis_lengths()
    lengths = {
        axis: buckets(needed_lengths, dataset.shapes[axis], batching.buckets, batch_size)
        for axis, needed_lengths in needed.items()
    }
    return _Bucketed(dataset, batch_size, needed, lengths)


def buckets(needed: npt.NDArray[np.integer], longest: int, count: int, batch_size: int) -> npt.NDArray[np.int64]:
    """At most `count` lengths, ascending, each of which is that of about the same number of batches.

    The p-quantile of batch lengths is the quantile p ** (1 / batch_size) of row lengths.

    Args:
        needed: Length of each row.
        longest: The last of the lengths.
        count: At least 1.
        batch_size: Rows of a batch.
    """
    shares = (np.arange(1, count + 1) / count) ** (1 / batch_size)
    lengths = np.quantile(needed, shares, method="higher")
    return np.unique([min(rounded(int(length)), longest) for length in lengths[:-1]] + [longest])


@attrs.frozen
class _Packed(Collator):
    """Several rows of the dataset share a row of the batch."""

    packer: Packer

    def batch(self, rows: Rows) -> Batch:
        return self.dataset.packed(rows, *self.packer.pack(rows))

    def places(self, rows: Rows) -> Rows:
        return places(rows, *self.packer.pack(rows))


@make_collator.register
def _(batching: Packed, dataset: Dataset, batch_size: int, blocks: int, sample: Sample) -> Collator:
    tokens, targets = dataset.packing_lengths()
    longest = int(np.argmax(tokens))
    if batching.length is not None and tokens[longest] > batching.length:
        raise DataError(
            f"batching.length: {dataset.row_ids[longest]} has {tokens[longest]:,} tokens, more than the "
            f"{batching.length:,} of a row, and is not split; raise batching.length, or leave it out"
        )
    packer = Packer(tokens, targets, batch_size=batch_size, blocks=blocks, length=batching.length, sample=sample())
    return _Packed(dataset, packer)
