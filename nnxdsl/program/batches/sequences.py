"""Sequences of tokens, one a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.data import Data
from nnxdsl.data.batch import SequenceBatch
from nnxdsl.data.packing import Size
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.models.attention import row_layout
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.program.batches.base import (
    AbstractArrays,
    BatchKind,
    BatchLengths,
    BatchT,
    Lengths,
    LossInputs,
    PairOptions,
    Rows,
    Targets,
    real_lengths,
    register,
    weighted_stats,
)


class AnySequences(BatchKind[BatchT]):
    """Padded and packed sequences."""

    def loss_inputs(self, stats: TokenStats, batch: BatchT, options: PairOptions) -> tuple[LossInputs, TokenStats]:
        """The statistics of each target."""
        return stats, weighted_stats(stats, batch.weight)

    def teacher_top_k(self, batch: BatchT) -> TeacherTopK | None:
        """The teacher's top-k of each target in the batch; None without."""
        return None if batch.teacher_top_ids is None else TeacherTopK(batch.teacher_top_ids, batch.teacher_top_logps)

    def with_teacher_top_k(self, batch: BatchT, top_k: TeacherTopK) -> BatchT:
        """The batch with the teacher's top-k, as `teacher_top_k` gives it."""
        return batch._replace(teacher_top_ids=top_k.token_ids, teacher_top_logps=top_k.logp)

    def without_cached(self, batch: BatchT) -> BatchT:
        """The batch without the teacher's top-k."""
        return batch._replace(teacher_top_ids=None, teacher_top_logps=None)


class SequenceKind(AnySequences[SequenceBatch]):
    """Padded sequences; the first token is no target."""

    def rows(self, batch: SequenceBatch) -> Rows:
        """Rows `[B, T]`."""
        length = batch.tokens.shape[1]
        return Rows(
            jnp.asarray(batch.tokens), positions_right_padded(batch.length, length), row_layout.sequence(length)
        )

    def targets(self, hidden: jax.Array, batch: SequenceBatch) -> Targets:
        """The tokens after the first, `[B, T - 1]`."""
        return Targets(hidden[:, :-1], batch.tokens[:, 1:], batch.loss_mask[:, 1:])

    def mtp_targets(self, hidden: jax.Array, batch: SequenceBatch) -> Targets:
        """The targets, and the states one slot earlier; the first target's may be any."""
        earlier = jnp.concatenate([hidden[:, :1], hidden[:, :-2]], axis=1)
        return Targets(earlier, batch.tokens[:, 1:], self.mtp_mask(batch))

    def target_mask(self, batch: SequenceBatch) -> jax.Array:
        """Which targets count, `[B, T - 1]`."""
        return jnp.asarray(batch.loss_mask[:, 1:])

    def mtp_mask(self, batch: SequenceBatch) -> jax.Array:
        """All but the first target, `[B, T - 1]`."""
        return self.target_mask(batch).at[:, :1].set(False) & (batch.weight[:, None] > 0)

    def teacher_top_k(self, batch: SequenceBatch) -> TeacherTopK | None:
        """See `AnySequences`; by target."""
        top_k = super().teacher_top_k(batch)
        return None if top_k is None else TeacherTopK(*(part[:, 1:] for part in top_k))

    def with_teacher_top_k(self, batch: SequenceBatch, top_k: TeacherTopK) -> SequenceBatch:
        """See `AnySequences`; by token."""
        by_token = TeacherTopK(*(jnp.pad(part, ((0, 0), (1, 0), (0, 0))) for part in top_k))
        return super().with_teacher_top_k(batch, by_token)

    def lengths(self, batch: SequenceBatch) -> BatchLengths:
        """Numbers of tokens of a batch in numpy."""
        return single_branch(real_lengths(batch.length, batch.weight), batch.loss_mask[batch.weight > 0])

    def padded(self, batch: SequenceBatch) -> tuple[int, Lengths]:
        """Rows of a batch and the tokens of each, padding included."""
        return len(batch.weight), Lengths(batch.tokens.shape[1], batch.tokens.shape[1] - 1)

    def abstract(self, data: Data, arrays: AbstractArrays, size: Size | None = None) -> SequenceBatch:
        """The largest batch of such data, without values."""
        (length,) = data.max_lengths()
        mask, weight = arrays.array(length, dtype=jnp.bool_), arrays.array(dtype=jnp.float32)
        return SequenceBatch(arrays.array(length), arrays.array(), mask, weight, *arrays.top_k(length))


def single_branch(lengths: np.ndarray, loss_mask: np.ndarray) -> BatchLengths:
    """Rows without a shared prompt."""
    return BatchLengths(np.zeros_like(lengths), (lengths,), int(np.sum(loss_mask)))


register(SequenceBatch, SequenceKind(), "sequences")
