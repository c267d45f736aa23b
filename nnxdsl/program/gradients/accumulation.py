"""Gradient accumulation over micro-batches; `gradcache.py` serves losses that compare rows of the whole batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from nnxdsl.data.batch import Batch
from nnxdsl.program.forward import Leaves
from nnxdsl.program.gradients import gradcache
from nnxdsl.program.loss_fn import divide
from nnxdsl.program.policy_loss import GradsAndTerms, PolicyLoss


def mean_grads(
    loss: PolicyLoss,
    microbatches: int,
    trainable: Leaves,
    frozen: Leaves,
    reference: Leaves,
    batch: Batch,
    keys: jax.Array | None,
    *,
    uses_gradcache: bool = False,
) -> GradsAndTerms:
    """Gradients of the mean loss over a batch (float32), and its terms.

    Args:
        loss: The loss of a micro-batch.
        microbatches: Number of micro-batches.
        trainable: The policy's trainable leaves.
        frozen: Its frozen leaves.
        reference: Leaves of the reference or teacher.
        batch: The batch.
        keys: A key for each of its rows `[B]`, for dropout; None for no dropout.
        uses_gradcache: Whether the loss compares rows of different micro-batches.
    """
    loss = loss.for_batch(batch)
    parts = jax.tree.map(partial(_split, microbatches), (batch, keys))
    if uses_gradcache:
        grads, terms = gradcache.summed_grads(loss, trainable, frozen, reference, *parts)
    elif microbatches == 1:
        grads, terms = loss.accumulate_grads(None, trainable, frozen, reference, batch, keys)
    else:
        grads, terms = summed_grads(loss, trainable, frozen, reference, *parts)
    return {path: divide(grad, loss.loss.divisor(path, terms)) for path, grad in grads.items()}, terms


def summed_grads(
    loss: PolicyLoss, trainable: Leaves, frozen: Leaves, reference: Leaves, parts: Batch, keys: jax.Array | None
) -> GradsAndTerms:
    """Gradients of the loss's sum over micro-batches `[microbatches, B / microbatches, ...]`, in a scan."""

    def add(total: GradsAndTerms, part: tuple[Batch, jax.Array | None]) -> tuple[GradsAndTerms, None]:
        return loss.accumulate_grads(total, trainable, frozen, reference, *part), None

    first, first_keys = jax.tree.map(lambda x: x[0], (parts, keys))
    terms = loss.zero_terms(loss.make_forward(frozen, first, reference, first_keys), loss.cast(trainable), first)
    zeros = {path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in trainable.items()}
    total, _ = jax.lax.scan(add, (zeros, terms), (parts, keys))
    return total


def _split(microbatches: int, x: jax.Array) -> jax.Array:
    """`[B, ...]` as `[microbatches, B / microbatches, ...]`; each device keeps rows that it already has."""
    return jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0)
