"""Sequences of tokens, several in a row, which do not see each other."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.data import Data
from nnxdsl.data.batch import PackedPairs, PackedSequences
from nnxdsl.data.packing import Size
from nnxdsl.models.attention import row_layout
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.program.batches.base import AbstractArrays, BatchLengths, Lengths, Rows, Targets, gather_sources, register
from nnxdsl.program.batches.sequences import AnySequences, single_branch


class PackedSequenceKind(AnySequences[PackedSequences]):
    """Packed sequences, in blocks of rows."""

    def rows(self, batch: PackedSequences) -> Rows:
        """Rows `[G * r, T]`."""
        return packed_rows(batch, jnp.zeros_like(batch.segment))

    def targets(self, hidden: jax.Array, batch: PackedSequences) -> Targets:
        """The targets of each block, `[G, C]`."""
        return Targets(gather_sources(hidden, batch.tokens, batch.source), batch.target, batch.loss_mask)

    def mtp_targets(self, hidden: jax.Array, batch: PackedSequences) -> Targets:
        """The targets, and the states one slot earlier; the first target's of a row may be any."""
        return Targets(gather_earlier(hidden, batch), batch.target, self.mtp_mask(batch))

    def target_mask(self, batch: PackedSequences) -> jax.Array:
        """Which targets count, `[G, C]`."""
        return jnp.asarray(batch.loss_mask)

    def mtp_mask(self, batch: PackedSequences) -> jax.Array:
        """The targets whose sequence has a token before, `[G, C]`."""
        return batch.loss_mask & has_earlier(batch) & (batch.weight[:, None] > 0)

    def lengths(self, batch: PackedSequences) -> BatchLengths:
        """Numbers of tokens of a batch in numpy."""
        segments = batch.segment.reshape(-1, batch.segment.shape[-1])
        counts = np.concatenate([np.bincount(segment)[1:] for segment in segments]).astype(np.int64)
        return single_branch(counts, batch.loss_mask)

    def padded(self, batch: PackedSequences) -> tuple[int, Lengths]:
        """Rows of a batch and the tokens of each, padding included."""
        return packed_lengths(batch)

    def abstract(self, data: Data, arrays: AbstractArrays, size: Size | None = None) -> PackedSequences:
        """The largest batch of such data, without values."""
        assert size is not None
        tokens, targets = arrays.array(size.rows, size.length), arrays.array(size.targets)
        mask, weight = arrays.array(size.targets, dtype=jnp.bool_), arrays.array(dtype=jnp.float32)
        top_k = arrays.top_k(size.targets)
        return PackedSequences(tokens, tokens, tokens, targets, targets, mask, weight, *top_k)


def packed_rows(batch: PackedSequences | PackedPairs, branch: jax.Array) -> Rows:
    """The rows of all blocks, `[G * r, T]`."""
    length = batch.tokens.shape[-1]
    tokens, *positions = (x.reshape(-1, length) for x in (batch.tokens, batch.position, batch.segment, branch))
    return Rows(tokens, TokenPositions(*positions), row_layout.packed(length))


def gather_earlier(hidden: jax.Array, batch: PackedSequences | PackedPairs) -> jax.Array:
    """States `[G, C, D]` one slot before those that predict the targets; any where `has_earlier` is False."""
    return gather_sources(hidden, batch.tokens, jnp.maximum(batch.source - 1, 0))


def has_earlier(batch: PackedSequences | PackedPairs) -> jax.Array:
    """Whether the slot before the one that predicts a target is of the same sequence, `[G, C]`."""
    length, slots = batch.tokens.shape[-1], batch.segment.reshape(len(batch.tokens), -1)  # [G, r * T]
    earlier = jnp.maximum(batch.source - 1, 0)
    same = jnp.take_along_axis(slots, earlier, axis=1) == jnp.take_along_axis(slots, batch.source, axis=1)
    return same & (batch.source % length > 0)


def packed_lengths(batch: PackedSequences | PackedPairs) -> tuple[int, Lengths]:
    """Rows of all blocks and the tokens of each, padding included."""
    rows, per_block = math.prod(batch.tokens.shape[:2]), batch.tokens.shape[1]
    return rows, Lengths(batch.tokens.shape[2], batch.target.shape[1] // per_block)


register(PackedSequences, PackedSequenceKind(), "sequences", is_packed=True)
