"""The gradient of a loss that compares all rows of a batch, which is computed in parts all the same.

First the models are asked about each part, forward only; of that a few numbers for each token are kept. The loss of the
whole batch says how it changes with every one of them, and each part then learns from its own (GradCache, Gao et al.
2021, arXiv:2101.06983, section 3). It costs one forward pass of the policy more. Knows no objective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from nnxdsl.data.batch import Batch
from nnxdsl.losses.base import LossTerms
from nnxdsl.program.forward import ForwardOutput

if TYPE_CHECKING:
    from nnxdsl.program.step import Leaves, TrainStep


def gradients(
    computation: TrainStep,
    trainable: Leaves,
    frozen: Leaves,
    reference: Leaves,
    parts: Batch,
    keys: jax.Array | None,
) -> tuple[Leaves, LossTerms]:
    """Gradients of the loss's sum over a batch (float32), and its terms.

    Args:
        computation: The mathematics of the run.
        trainable: As of a step, as the next two.
        frozen: As above.
        reference: As above.
        parts: The micro-batches, every array `[microbatches, B / microbatches, ...]`.
        keys: Of their rows, for the policy's dropout; None for no dropout.
    """
    leaves = computation.cast(trainable)

    def ask(part: tuple[Batch, jax.Array | None]) -> Any:
        batch, keys = part
        return computation.policy_and_reference(leaves, frozen, reference, batch, keys)

    (scored, stats, routing, further), compared = jax.lax.map(ask, (parts, keys))
    scored, stats, further, compared = (jax.tree.map(_joined, tree) for tree in (scored, stats, further, compared))
    # What routers say are sums over tokens.
    said = ForwardOutput(scored, stats, jax.tree.map(lambda x: jnp.sum(x, axis=0), routing), further)
    batch = jax.tree.map(_joined, parts)

    def total(said: ForwardOutput) -> tuple[jax.Array, LossTerms]:
        terms = computation.total_loss(said, compared, batch)
        return terms.loss.total, terms

    toward, terms = jax.grad(total, has_aux=True)(said)
    count = len(jax.tree.leaves(parts)[0])
    by_row = (toward.scored, toward.stats, toward.further)
    toward_rows = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), by_row)

    def add(summed: Leaves, part: tuple[Batch, jax.Array | None, Any]) -> tuple[Leaves, None]:
        batch, keys, (of_scored, of_stats, of_further) = part
        _, back = jax.vjp(computation.make_forward(frozen, batch, reference, keys), leaves)
        (more,) = back(ForwardOutput(of_scored, of_stats, toward.routing, of_further))
        return jax.tree.map(lambda one, other: one + other.astype(one.dtype), summed, more), None

    nothing = {path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in trainable.items()}
    summed, _ = jax.lax.scan(add, nothing, (parts, keys, toward_rows))
    return summed, terms


def _joined(x: jax.Array) -> jax.Array:
    """`[microbatches, B / microbatches, ...]` as `[B, ...]`, in the order of the parts."""
    return x.reshape(-1, *x.shape[2:])
