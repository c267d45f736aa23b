"""A kind of batch of somebody else's: sequences with a score."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxdsl import Data
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.program.batches import AbstractArrays, PairOptions, register
from nnxdsl.program.batches.sequences import SequenceKind


class ScoredBatch(NamedTuple):
    """B token sequences with a score each; the first four as of `SequenceBatch`.

    Attributes:
        score: [B] float32.
    """

    tokens: Any
    length: Any
    loss_mask: Any
    weight: Any
    score: Any


class ScoredTokens(NamedTuple):
    """What a loss reads: statistics of all targets `[B, N]`, and the scores of their sequences `[B]`."""

    stats: TokenStats
    score: jax.Array


class ScoredKind(SequenceKind):
    """Sequences that go through the model like others, whose loss reads the scores as well."""

    def loss_inputs(self, stats: TokenStats, batch: Any, options: PairOptions) -> Any:
        """The statistics of each target with the scores, and the statistics for metrics."""
        inputs, token_stats = super().loss_inputs(stats, batch, options)
        return ScoredTokens(inputs, batch.score), token_stats  # pyright: ignore[reportArgumentType]

    def without_cached(self, batch: Any) -> Any:
        """The batch itself: it carries nothing of a teacher."""
        return batch

    def abstract(self, data: Data, arrays: AbstractArrays, size: Any = None) -> Any:
        """The largest batch of such data, without values."""
        same = super().abstract(data, arrays)
        return ScoredBatch(same.tokens, same.length, same.loss_mask, same.weight, arrays.array(dtype=jnp.float32))


register(ScoredBatch, ScoredKind(), "scored")
