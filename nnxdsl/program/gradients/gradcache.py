"""GradCache: gradients, in micro-batches, of a loss that compares all rows of a batch.

A first forward pass of each micro-batch stores its outputs. The loss of the whole batch gives their cotangents, with
which each micro-batch is then computed forward and backward (Gao et al. 2021, arXiv:2101.06983, section 3). It costs
one more forward pass of the policy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from nnxdsl.data.batch import Batch
from nnxdsl.losses.base import LossTerms
from nnxdsl.program.forward import ForwardOutput, Leaves
from nnxdsl.program.policy_loss import GradsAndTerms, PolicyLoss


def summed_grads(
    loss: PolicyLoss, trainable: Leaves, frozen: Leaves, reference: Leaves, parts: Batch, keys: jax.Array | None
) -> GradsAndTerms:
    """Gradients of the loss's sum over a batch (float32), and its terms.

    Args:
        loss: The loss.
        trainable: The policy's trainable leaves.
        frozen: Its frozen leaves.
        reference: Leaves of the reference or teacher.
        parts: The micro-batches, every array `[microbatches, B / microbatches, ...]`.
        keys: Of their rows, for the policy's dropout; None for no dropout.
    """
    leaves = loss.cast(trainable)

    def outputs(part: tuple[Batch, jax.Array | None]) -> Any:
        batch, keys = part
        return loss.policy_and_reference(leaves, frozen, reference, batch, keys)

    stacked, compared = jax.lax.map(outputs, (parts, keys))
    by_row = stacked.loss_inputs, stacked.token_stats, stacked.mtp_stats, compared
    loss_inputs, token_stats, mtp_stats, compared = (jax.tree.map(_join, tree) for tree in by_row)
    # Router and indexer statistics are sums over tokens.
    sums = stacked.router_stats, stacked.indexer_stats
    router_stats, indexer_stats = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
    max_logits = jax.tree.map(lambda x: jnp.max(x, axis=0), stacked.max_logits)
    out = ForwardOutput(loss_inputs, token_stats, router_stats, mtp_stats, max_logits, indexer_stats)
    batch = jax.tree.map(_join, parts)

    def total(out: ForwardOutput) -> tuple[jax.Array, LossTerms]:
        terms = loss.loss(out, compared, batch)
        return loss.loss.minimized(terms), terms

    cotangents, terms = jax.grad(total, has_aux=True)(out)
    count = len(jax.tree.leaves(parts)[0])
    by_row = (cotangents.loss_inputs, cotangents.token_stats, cotangents.mtp_stats)
    row_cotangents = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), by_row)

    def add(summed: Leaves, part: tuple[Batch, jax.Array | None, Any]) -> tuple[Leaves, None]:
        batch, keys, (loss_inputs, token_stats, mtp_stats) = part
        _, backward = jax.vjp(loss.make_forward(frozen, batch, reference, keys), leaves)
        rows = {"loss_inputs": loss_inputs, "token_stats": token_stats, "mtp_stats": mtp_stats}
        (grads,) = backward(cotangents._replace(**rows))
        return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), summed, grads), None

    zeros = {path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in trainable.items()}
    summed, _ = jax.lax.scan(add, zeros, (parts, keys, row_cotangents))
    return summed, terms


def _join(x: jax.Array) -> jax.Array:
    """`[microbatches, B / microbatches, ...]` as `[B, ...]`, in the order of the parts."""
    return x.reshape(-1, *x.shape[2:])
