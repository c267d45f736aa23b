"""Batch sampling: the rows of a step are a pure function of seed and step, so that a resume skips earlier batches."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nnxdsl.config.batching import Batching
from nnxdsl.config.data import Order
from nnxdsl.data.batch import Batch
from nnxdsl.data.collate import Collator, make_collator
from nnxdsl.data.dataset import Dataset, Reads
from nnxdsl.data.mixture import MixedRows
from nnxdsl.data.row_order import PIECE, Rows, is_permutation, joined, sorted_pieces
from nnxdsl.errors import DataError
from nnxdsl.storage.records import changes

PADDED = Batching.Padded()

SAMPLED = 64
"""Number of steps of an epoch by which the sizes of packed batches are chosen."""


@functools.singledispatch
def permutation(order: Order, rows: int, seed: int, epoch: int) -> Rows:
    """[rows] the order of one epoch; other packages register theirs with `@permutation.register(MyOrder)`."""
    raise DataError(
        f"{type(order).__name__}: no order is registered for it; register a function with "
        f"@nnxdsl.data.sampler.permutation.register({type(order).__name__})"
    )


@permutation.register(Order.AsInFile)
def _as_in_file(order: Order, rows: int, seed: int, epoch: int) -> Rows:
    return joined((np.arange(begin, min(begin + PIECE, rows)) for begin in range(0, rows, PIECE)), rows)


@permutation.register(Order.Shuffled)
def _shuffled(order: Order, rows: int, seed: int, epoch: int) -> Rows:
    # Ranks of raw Philox values: numpy guarantees that the raw stream of a bit generator never changes, but not that of
    # Generator.permutation, and a run may be resumed with another numpy. The sort is stable for equal values.
    key = hashlib.sha256(f"nnxdsl order 1: seed {seed}, epoch {epoch}".encode()).digest()[:16]

    def values() -> Iterator[npt.NDArray[np.uint64]]:
        stream = np.random.Philox(key=int.from_bytes(key, "little"))
        return (stream.random_raw(min(PIECE, rows - begin)) for begin in range(0, rows, PIECE))

    return joined((piece for piece, _ in sorted_pieces(values, rows)), rows)


def ordered(order: Order, rows: int, seed: int, epoch: int) -> Rows:
    """[rows] the checked `permutation`.

    Raises:
        DataError: It is not a permutation of the rows.
    """
    indices = np.asarray(permutation(order, rows, seed, epoch))
    if indices.shape != (rows,) or not np.issubdtype(indices.dtype, np.integer) or not is_permutation(indices):
        raise DataError(f"{type(order).__name__}: expected each of {rows:,} rows once in epoch {epoch}")
    return indices


_CHANGED = {
    "digest": "the data file has changed (sha256)",
    "rows": "the number of accepted rows has changed",
    "seed": "the seed has changed",
    "batch_size": "the batch size has changed",
    "order": "the order has changed",
}


class BatchSampler:
    """Endless batches over a dataset with random access: it has no position, `at(step)` is pure.

    Epochs follow each other without a gap: a batch may span two of them, and no row is skipped.

    Args:
        dataset: The rows.
        batch_size: Rows in a batch; may be more than the dataset has.
        seed: The experiment's seed.
        order: Order of the rows.
        batching: How the rows of a step become a batch.
        blocks: Number of blocks of a packed batch: micro-batches times data shards.

    Raises:
        DataError: The dataset does not support this batching.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        order: Order,
        batching: Batching = PADDED,
        blocks: int = 1,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.order = order
        # Caches two epochs, since a batch may span them.
        self._permutation = functools.lru_cache(maxsize=2)(lambda epoch: ordered(order, len(dataset), seed, epoch))
        self._mixed = self._mixture()
        self._collator: Collator = make_collator(batching, dataset, batch_size, blocks, self._sample)

    def over(self, dataset: Dataset) -> BatchSampler:
        """The same batches of another dataset with the same rows."""
        same = copy.copy(self)
        same.dataset, same._collator = dataset, self._collator.over(dataset)
        return same

    def indices(self, step: int) -> Rows:
        """[batch_size] rows of the dataset in step `step` (from 0)."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        if self._mixed is not None:
            return self._mixed.rows_at(places)
        epochs, within = np.divmod(places, len(self.dataset))
        return np.concatenate([self._permutation(int(e))[within[epochs == e]] for e in np.unique(epochs)])

    def shares(self, step: int) -> dict[str, float]:
        """The share of each source of a mixture in the rows of a step, as metrics; empty without a mixture."""
        if self._mixed is None:
            return {}
        counts = np.bincount(self._mixed.source_of(self.indices(step)), minlength=len(self.dataset.mixture))
        names = [f"mixture/{source.name}" for source in self.dataset.mixture]
        return dict(zip(names, (counts / self.batch_size).tolist(), strict=True))

    def _mixture(self) -> MixedRows | None:
        if not self.dataset.mixture:
            return None
        sources = self.dataset.mixture
        return MixedRows(
            [source.share for source in sources],
            [source.rows for source in sources],
            self.seed,
            lambda source, epoch: ordered(sources[source].order, sources[source].rows, self.seed, epoch),
            shuffled=not isinstance(self.order, Order.AsInFile),
        )

    def batch_at(self, step: int, reads: Reads | None = None) -> Batch:
        """The batch of step `step` (from 0).

        Args:
            step: The step.
            reads: Which of its rows are read, from `places`; None for all. See `Dataset.only`.
        """
        rows = self.indices(step)
        if reads is None:
            return self._collator.batch(rows)
        return self._collator.over(self.dataset.only(reads(self._collator.places(rows)))).batch(rows)

    def places(self, step: int) -> Rows:
        """The row of the dataset of each pair or sequence of that batch, or -1, in the shape of the batch's `weight`.

        For packed sequences [blocks, sequences].
        """
        return self._collator.places(self.indices(step))

    def _sample(self) -> list[Rows]:
        """The rows of some steps, evenly spaced over an epoch."""
        steps = -(-len(self.dataset) // self.batch_size)
        return [self.indices(int(step)) for step in np.unique(np.linspace(0, steps - 1, SAMPLED).astype(int))]

    def state(self, position: int = 0) -> dict[str, Any]:
        """The state for a checkpoint: the number of consumed steps, and all that determines the following batches."""
        return {
            "position": position,
            "digest": self.dataset.digest,
            "rows": len(self.dataset),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "order": type(self.order).__name__,
        }

    def check(self, state: Mapping[str, Any]) -> int:
        """The position in a checkpoint's state.

        Raises:
            DataError: File, rows, seed, batch size or order differ from the checkpoint's; names both values.
        """
        if changed := changes(_CHANGED, state, self.state()):
            raise DataError(f"{self.dataset.report.source}: cannot resume from the checkpoint: {'; '.join(changed)}")
        return int(state["position"])
