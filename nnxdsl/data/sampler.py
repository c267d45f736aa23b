"""Which rows make up which step: a pure function of seed and step, so that a run resumes anywhere without replaying."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nnxdsl.config.batching import Batching
from nnxdsl.config.data import Order
from nnxdsl.data.batch import Batch
from nnxdsl.data.collate import Collator, maker
from nnxdsl.data.dataset import Dataset
from nnxdsl.errors import DataError

Rows = npt.NDArray[np.int64]

PADDED = Batching.Padded()

SAMPLED = 64
"""Steps of an epoch that the sizes of packed batches are chosen by."""


@functools.singledispatch
def permutation(order: Order, rows: int, seed: int, epoch: int) -> Rows:
    """[rows] the order of one epoch. Orders of other packages register here: `@permutation.register(MyOrder)`."""
    raise DataError(
        f"{type(order).__name__}: no order is registered for it; register a function with "
        f"@nnxdsl.data.sampler.permutation.register({type(order).__name__})"
    )


@permutation.register(Order.AsInFile)
def _as_in_file(order: Order, rows: int, seed: int, epoch: int) -> Rows:
    return np.arange(rows)


@permutation.register(Order.Shuffled)
def _shuffled(order: Order, rows: int, seed: int, epoch: int) -> Rows:
    # Ranks of raw Philox words: numpy promises that a bit generator's raw stream never changes, which it does not
    # promise of Generator.permutation, and a resumed run may meet another numpy. Equal words keep their places.
    key = hashlib.sha256(f"nnxdsl order 1: seed {seed}, epoch {epoch}".encode()).digest()[:16]
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(rows)
    return np.argsort(words, kind="stable")


def ordered(order: Order, rows: int, seed: int, epoch: int) -> Rows:
    """[rows] as `permutation`, which it must be.

    Raises:
        DataError: it leaves rows out, or has some twice.
    """
    found = np.asarray(permutation(order, rows, seed, epoch))
    if not np.array_equal(np.sort(found, axis=None), np.arange(rows)):
        raise DataError(f"{type(order).__name__}: expected each of {rows:,} rows once in epoch {epoch}")
    return found


class BatchSampler:
    """Endless batches over a dataset, any of them reachable at once. Holds no position: `at(step)` is pure.

    Epoch follows epoch without a gap, so a batch may hold the end of one and the beginning of the next, and no row is
    passed over.

    Args:
        dataset: The rows.
        batch_size: Rows in a batch; may be more than the dataset has.
        seed: The experiment's seed.
        order: Order of the rows.
        batching: How the rows of a step become a batch.
        blocks: Equal parts of a packed batch, each of whole rows: as many as there are shares that one device computes
            at one time.

    Raises:
        DataError: The dataset cannot be batched so.
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
        # A cache for speed alone: two epochs, since a batch may span a border.
        self._permutation = functools.lru_cache(maxsize=2)(lambda epoch: ordered(order, len(dataset), seed, epoch))
        self._maker: Collator = maker(batching, dataset, batch_size, blocks, self._sample)

    def over(self, dataset: Dataset) -> BatchSampler:
        """The same order over another form of the same rows."""
        same = copy.copy(self)
        same.dataset, same._maker = dataset, self._maker.over(dataset)
        return same

    def indices(self, step: int) -> Rows:
        """[batch_size] rows of the dataset that step `step` (from 0) learns from."""
        places = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, within = np.divmod(places, len(self.dataset))
        return np.concatenate([self._permutation(int(e))[within[epochs == e]] for e in np.unique(epochs)])

    def at(self, step: int) -> Batch:
        """The batch of step `step` (from 0)."""
        return self._maker.batch(self.indices(step))

    def places(self, step: int) -> Rows:
        """Which row of the dataset each pair of that batch is, or -1, in the shape of its `weight`; or each sequence.

        Packed sequences stand by block: [blocks, sequences].
        """
        return self._maker.places(self.indices(step))

    def _sample(self) -> list[Rows]:
        """The rows of some steps, spread over an epoch: such as will come."""
        steps = -(-len(self.dataset) // self.batch_size)
        return [self.indices(int(step)) for step in np.unique(np.linspace(0, steps - 1, SAMPLED).astype(int))]

    def state(self, position: int = 0) -> dict[str, Any]:
        """What a checkpoint keeps: the number of steps consumed, and everything that decides what comes next."""
        return {
            "position": position,
            "digest": self.dataset.digest,
            "rows": len(self.dataset),
            "seed": self.seed,
            "batch_size": self.batch_size,
            "order": type(self.order).__name__,
        }

    def check(self, state: Mapping[str, Any]) -> int:
        """The position in a state that this order can go on from.

        Raises:
            DataError: The file, the rows kept, the seed, the batch size or the order is another; says which and how.
        """
        now = self.state()
        words = {
            "digest": "the data file has changed (sha256)",
            "rows": "the number of kept rows has changed",
            "seed": "the seed has changed",
            "batch_size": "the batch size has changed",
            "order": "the order has changed",
        }
        changed = [
            f"{what}: the checkpoint has {_short(state.get(name))}, this run {_short(now[name])}"
            for name, what in words.items()
            if state.get(name) != now[name]
        ]
        if changed:
            raise DataError(
                f"{self.dataset.report.source}: cannot go on where the checkpoint stopped: {'; '.join(changed)}"
            )
        return int(state["position"])


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else str(value)
