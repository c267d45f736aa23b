"""How the rows of a step become one batch: padded, cut to a bucket, or packed. Pure functions of dataset and rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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
"""Gives the rows of steps such as will come."""


class Collator(Protocol):
    """Makes batches of one dataset."""

    def batch(self, rows: Rows) -> Batch:
        """The batch of a step's rows."""
        ...

    def places(self, rows: Rows) -> Rows:
        """Which of the rows stands where in that batch; -1 where none does."""
        ...

    def over(self, dataset: Dataset) -> Collator:
        """The same over another form of the same rows."""
        ...


@functools.singledispatch
def maker(batching: Batching, dataset: Dataset, batch_size: int, blocks: int, sample: Sample) -> Collator:
    """What makes the batches of a dataset; ways of other packages register here: `@maker.register(MyBatching)`.

    Args:
        batching: The way.
        dataset: The rows.
        batch_size: Rows of a step.
        blocks: Equal parts in which a packed batch is computed.
        sample: Rows of some steps.

    Raises:
        DataError: The dataset cannot be batched so.
    """
    name = type(batching).__name__
    raise DataError(f"batching: nothing is registered for {name}; add @nnxdsl.data.collate.maker.register({name})")


@attrs.frozen
class _Padded:
    """Every batch as long as the longest row."""

    dataset: Dataset
    batch_size: int

    def batch(self, rows: Rows) -> Batch:
        return self.dataset.batch(rows, self.batch_size)

    def places(self, rows: Rows) -> Rows:
        return rows

    def over(self, dataset: Dataset) -> Collator:
        return attrs.evolve(self, dataset=dataset)


@maker.register
def _(batching: Padded, dataset: Dataset, batch_size: int, blocks: int, sample: Sample) -> Collator:
    return _Padded(dataset, batch_size)


@attrs.frozen
class _Bucketed:
    """Every batch as long as the least of a few lengths that its rows fit in."""

    dataset: Dataset
    batch_size: int
    needed: Mapping[str, npt.NDArray[np.int32]]
    buckets: Mapping[str, npt.NDArray[np.int64]]

    def batch(self, rows: Rows) -> Batch:
        shapes = {
            axis: int(lengths[np.searchsorted(lengths, self.needed[axis][rows].max())])
            for axis, lengths in self.buckets.items()
        }
        return self.dataset.cut_to(shapes).batch(rows, self.batch_size)

    def places(self, rows: Rows) -> Rows:
        return rows

    def over(self, dataset: Dataset) -> Collator:
        return attrs.evolve(self, dataset=dataset)


@maker.register
def _(batching: Bucketed, dataset: Dataset, batch_size: int, blocks: int, sample: Sample) -> Collator:
    needed = dataset.axis_lengths()
    found = {axis: buckets(own, dataset.shapes[axis], batching.buckets, batch_size) for axis, own in needed.items()}
    return _Bucketed(dataset, batch_size, needed, found)


def buckets(needed: npt.NDArray[np.integer], longest: int, count: int, batch_size: int) -> npt.NDArray[np.int64]:
    """At most `count` lengths, ascending, of which about as many batches take each.

    A share p of all batches is not longer than the quantile p ** (1 / batch_size) of all rows.

    Args:
        needed: By each row.
        longest: The last of the lengths.
        count: At least 1.
        batch_size: Rows of a batch.
    """
    shares = (np.arange(1, count + 1) / count) ** (1 / batch_size)
    lengths = np.quantile(needed, shares, method="higher")
    return np.unique([min(rounded(int(length)), longest) for length in lengths[:-1]] + [longest])


@attrs.frozen
class _Packed:
    """Rows side by side."""

    dataset: Dataset
    packer: Packer

    def batch(self, rows: Rows) -> Batch:
        return self.dataset.packed(rows, *self.packer.pack(rows))

    def places(self, rows: Rows) -> Rows:
        return places(rows, *self.packer.pack(rows))

    def over(self, dataset: Dataset) -> Collator:
        return attrs.evolve(self, dataset=dataset)


@maker.register
def _(batching: Packed, dataset: Dataset, batch_size: int, blocks: int, sample: Sample) -> Collator:
    tokens, targets = dataset.loads()
    longest = int(np.argmax(tokens))
    if batching.length is not None and tokens[longest] > batching.length:
        raise DataError(
            f"batching.length: {dataset.row_ids[longest]} has {tokens[longest]:,} tokens, more than the "
            f"{batching.length:,} of a row, and is not split; raise batching.length, or leave it out"
        )
    packer = Packer(tokens, targets, batch_size=batch_size, blocks=blocks, length=batching.length, sample=sample())
    return _Packed(dataset, packer)
