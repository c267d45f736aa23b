"""Prompts with completions that the policy has generated."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.config.data import Data
from nnxdsl.data.batch import GroupBatch, RolloutBatch
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
        positions, layout = positions_right_padded(batch.length, length), row_layout.sequence(length)
        return Rows(jnp.asarray(batch.tokens), positions, layout, batch.routed_experts)

    def targets(self, hidden: jax.Array, batch: RolloutBatch) -> Targets:
        """The tokens of completions `[B, R]`; the first is predicted from the prompt's last."""
        prompt = jnp.asarray(batch.length - batch.completion_length)  # [B]
        source = prompt[:, None] - 1 + jnp.arange(batch.completion_ids.shape[1])
        source = jnp.minimum(source, hidden.shape[1] - 1)  # of the padding
        return Targets(jnp.take_along_axis(hidden, source[:, :, None], axis=1), batch.completion_ids, batch.loss_mask)

    def target_mask(self, batch: RolloutBatch) -> jax.Array:
        """Which targets count, `[B, R]`."""
        return jnp.asarray(batch.loss_mask)

    def loss_inputs(
        self, stats: TokenStats, batch: RolloutBatch, options: PairOptions
    ) -> tuple[LossInputs, TokenStats]:
        """The statistics of the completions' tokens `[B, R]`, with their advantages."""
        return rollout_outputs(stats, batch)

    def reference_logps(self, batch: RolloutBatch) -> RolloutOutputs | None:
        """The reference's log-probabilities in the batch, without other statistics; None without."""
        return reference_outputs(batch)

    def for_teacher(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch with the teacher's prompts, if it has them; see `BatchKind.for_teacher`."""
        if batch.teacher_tokens is None:
            return batch
        return batch._replace(tokens=batch.teacher_tokens, length=batch.teacher_length)

    def without_cached(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch without log-probabilities of sampling, sampler and reference, what follows, and teacher prompts."""
        batch = batch._replace(teacher_tokens=None, teacher_length=None)
        return batch._replace(old_logps=None, ref_logps=None, sampler_logps=None, entropy_mask=None)

    def lengths(self, batch: RolloutBatch) -> BatchLengths:
        """What a batch in numpy holds."""
        return attrs.evolve(
            single_branch(real_lengths(batch.length, batch.weight), batch.loss_mask[batch.weight > 0]),
            has_reference_logps=batch.ref_logps is not None,
        )

    def padded(self, batch: RolloutBatch) -> tuple[int, Lengths]:
        """Rows of a batch and the tokens of each, padding among them."""
        return len(batch.weight), Lengths(batch.tokens.shape[1], batch.completion_ids.shape[1])

    def abstract(self, data: Data, arrays: AbstractArrays, size: Size | None = None) -> RolloutBatch:
        """The largest batch of such data, without values."""
        prompt, response = data.max_lengths()
        tokens = arrays.array(prompt + response), arrays.array(), arrays.array(response), arrays.array()
        experts = arrays.experts(prompt + response)
        batch = RolloutBatch(*tokens, **abstract_per_token(arrays, response), routed_experts=experts)
        if not arrays.has_teacher_prompts(data):
            return batch
        return batch._replace(teacher_tokens=batch.tokens, teacher_length=batch.length)


def rollout_outputs(stats: TokenStats, batch: RolloutBatch | GroupBatch) -> tuple[RolloutOutputs, TokenStats]:
    """The inputs of the loss of `[B, R]` tokens, and statistics without completions of weight 0."""
    values = batch.advantages, batch.max_completion_length, batch.old_logps, batch.sampler_logps
    chosen = None if batch.entropy_mask is None else jnp.asarray(batch.entropy_mask, jnp.float32)
    outputs = RolloutOutputs(stats, *values, chosen)
    return outputs, weighted_stats(stats, batch.weight)


def reference_outputs(batch: RolloutBatch | GroupBatch) -> RolloutOutputs | None:
    """The reference's log-probabilities `[B, R]` in a batch, without other statistics; None without."""
    if batch.ref_logps is None:
        return None
    logps, zeros = jnp.asarray(batch.ref_logps), jnp.zeros(batch.loss_mask.shape, jnp.float32)
    stats = TokenStats(logps, zeros, zeros, zeros, jnp.asarray(batch.loss_mask, jnp.float32))
    return RolloutOutputs(stats, batch.advantages, batch.max_completion_length, batch.old_logps)


def abstract_per_token(arrays: AbstractArrays, *shape: int) -> dict[str, Any]:
    """What a loss reads of completions, without values; `shape` is that of their tokens, but for the rows."""
    per_token, weight = arrays.array(*shape, dtype=jnp.float32), arrays.array(*shape[:-1], dtype=jnp.float32)
    k = arrays.teacher_top_k
    return {
        "loss_mask": arrays.array(*shape, dtype=jnp.bool_),
        "weight": weight,
        "advantages": per_token,
        "max_completion_length": weight,
        "old_logps": per_token if arrays.has_old_logps else None,
        "ref_logps": per_token if arrays.has_ref_logps else None,
        "sampler_logps": per_token,
        "entropy_mask": arrays.array(*shape, dtype=jnp.bool_) if arrays.has_entropy_mask else None,
        "teacher_logps": per_token if arrays.served_teachers and k is None else None,
        "teacher_top_ids": None if k is None else arrays.array(*shape, k),
        "teacher_top_logps": None if k is None else arrays.array(*shape, k + 1, dtype=jnp.float32),
        "teacher_index": arrays.array(*shape[:-1]) if arrays.served_teachers > 1 else None,
    }


register(RolloutBatch, RolloutKind(), "prompts")
