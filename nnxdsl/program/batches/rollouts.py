"""Prompts with completions that the policy has generated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nnxdsl.config.data import Data
from nnxdsl.data.batch import RolloutBatch
from nnxdsl.data.packing import Size
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.losses.policy_gradient import RolloutOutputs
from nnxdsl.models.attention import row_layout
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.program.batches.base import (
    AbstractArrays,
    BatchKind,
    BatchLengths,
    Lengths,
    LossInputs,
    PairOptions,
    Rows,
    Targets,
    real_lengths,
    register,
    weighted_stats,
)
from nnxdsl.program.batches.sequences import single_branch


class RolloutKind(BatchKind[RolloutBatch]):
    """A prompt and its completion a row."""

    def rows(self, batch: RolloutBatch) -> Rows:
        """Rows `[B, T]`."""
        length = batch.tokens.shape[1]
        return Rows(
            jnp.asarray(batch.tokens), positions_right_padded(batch.length, length), row_layout.sequence(length)
        )

    def targets(self, hidden: jax.Array, batch: RolloutBatch) -> Targets:
        """The tokens of completions `[B, R]`; the first is predicted from the prompt's last."""
        prompt = batch.length - jnp.sum(batch.loss_mask, axis=1)  # [B]
        source = prompt[:, None] - 1 + jnp.arange(batch.answer.shape[1])
        source = jnp.minimum(source, hidden.shape[1] - 1)  # of the padding
        return Targets(jnp.take_along_axis(hidden, source[:, :, None], axis=1), batch.answer, batch.loss_mask)

    def target_mask(self, batch: RolloutBatch) -> jax.Array:
        """Which targets count, `[B, R]`."""
        return jnp.asarray(batch.loss_mask)

    def loss_inputs(
        self, stats: TokenStats, batch: RolloutBatch, options: PairOptions
    ) -> tuple[LossInputs, TokenStats]:
        """The statistics of the completions' tokens `[B, R]`, with their advantages."""
        return RolloutOutputs(stats, batch.advantage, batch.limit, batch.old), weighted_stats(stats, batch.weight)

    def lengths(self, batch: RolloutBatch) -> BatchLengths:
        """What a batch in numpy holds."""
        return single_branch(real_lengths(batch.length, batch.weight), batch.loss_mask[batch.weight > 0])

    def padded(self, batch: RolloutBatch) -> tuple[int, Lengths]:
        """Rows of a batch and the tokens of each, padding among them."""
        return len(batch.weight), Lengths(batch.tokens.shape[1], batch.answer.shape[1])

    def abstract(self, data: Data, arrays: AbstractArrays, size: Size | None = None) -> RolloutBatch:
        """The largest batch of such data, without values."""
        prompt, response = data.max_lengths()
        weight, mask = arrays.array(dtype=jnp.float32), arrays.array(response, dtype=jnp.bool_)
        old_logps = arrays.array(response, dtype=jnp.float32) if arrays.has_cached else None
        tokens = arrays.array(prompt + response), arrays.array(), arrays.array(response), mask
        return RolloutBatch(*tokens, weight, weight, weight, old_logps)


register(RolloutBatch, RolloutKind(), "prompts")
