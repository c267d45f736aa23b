"""Deterministic interleaving of the sources of a mixture: a pure function of seed and position."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

BLOCK = 1024
"""Places after which the sources have their shares again, to a row or two."""


class MixedRows:
    """The rows of a mixture, as indices into its sources one after another.

    Each block of `BLOCK` places has the share of each source, to a row or two, which do not add up over the blocks. The
    sources of a block are shuffled; each source goes through its own epochs.

    Args:
        shares: Share of each source in the rows; they add up to 1.
        rows: Number of rows of each source.
        seed: The experiment's seed.
        permutation: From a source and an epoch to the order of the source's rows.
        shuffled: Whether the sources of a block are shuffled; otherwise each is spread evenly over it.
    """

    def __init__(
        self,
        shares: Sequence[float],
        rows: Sequence[int],
        seed: int,
        permutation: Callable[[int, int], Rows],
        *,
        shuffled: bool = True,
    ) -> None:
        self.shares = np.asarray(shares, np.float64) / sum(shares)
        self._rows, self._seed, self._shuffled = tuple(rows), seed, shuffled
        self._starts = np.concatenate([[0], np.cumsum(rows)[:-1]])
        # Two epochs of each source, since a batch may span them.
        self._order = functools.lru_cache(maxsize=2 * len(rows))(permutation)
        self._block = functools.lru_cache(maxsize=4)(self._sources_of_block)

    def rows_at(self, places: Rows) -> Rows:
        """[n] the row at each of some places, which may be of any epoch."""
        out = np.empty(len(places), np.int64)
        blocks, within = np.divmod(places, BLOCK)
        for block in np.unique(blocks).tolist():
            sources, ordinals = self._block(block)
            here = blocks == block
            for source in np.unique(sources[within[here]]).tolist():
                of_source = here.copy()
                of_source[here] = sources[within[here]] == source
                epochs, index = np.divmod(ordinals[within[of_source]], self._rows[source])
                chosen = np.empty(len(index), np.int64)
                for epoch in np.unique(epochs).tolist():
                    chosen[epochs == epoch] = self._order(source, epoch)[index[epochs == epoch]]
                out[of_source] = self._starts[source] + chosen
        return out

    def source_of(self, rows: Rows) -> Rows:
        """[n] the source of each of some rows."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def epochs(self, places: int) -> list[float]:
        """How often each source is seen in so many places."""
        return [float(places * share / rows) for share, rows in zip(self.shares, self._rows, strict=True)]

    def _sources_of_block(self, block: int) -> tuple[Rows, Rows]:
        """[BLOCK] the source at each place of a block, and how many of that source's rows came before it."""
        before, after = self._counts(block * BLOCK), self._counts((block + 1) * BLOCK)
        counts = after - before
        sources = np.repeat(np.arange(len(counts)), counts)
        if self._shuffled:
            key = hashlib.sha256(f"nnxdsl mixture 1: seed {self._seed}, block {block}".encode()).digest()[:16]
            values = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(BLOCK)
            sources = sources[np.argsort(values, kind="stable")]
        else:
            sources = sources[
                np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n]), kind="stable")
            ]
        ordinals = np.empty(BLOCK, np.int64)
        for source, count in enumerate(counts.tolist()):
            ordinals[sources == source] = before[source] + np.arange(count)
        return sources, ordinals

    def _counts(self, places: int) -> Rows:
        """[sources] rows of each source in the first places, by the divisor method of Sainte-Lague.

        Row n of a source of share p is due at place (n + 1/2) / p, so that counts never fall as places are added.
        """
        due = max(0.0, places - 2.0 * (len(self.shares) + 1))  # rows due before are certain; the others follow singly
        counts = np.floor(due * self.shares + 0.5).astype(np.int64)
        while counts.sum() < places:
            counts[np.argmin((counts + 0.5) / self.shares)] += 1
        return counts
