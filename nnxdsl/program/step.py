"""One optimizer step and one evaluation as pure functions over flat leaves; the compiler jits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import optax

from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.models.tree import Template
from nnxdsl.program.forward import Forward, token_count
from nnxdsl.program.logprobs import TokenStats
from nnxdsl.program.losses import PairLoss, Pairs, Ratio, SequenceLoss, Terms

Leaves = dict[str, jax.Array]
Batch = PairBatch | SequenceBatch


class Moving(NamedTuple):
    """What a step replaces; its buffers are donated.

    Attributes:
        step: int32 scalar, optimizer steps done.
        trainable: Float32 parameters by path.
        optimizer: The optax state.
    """

    step: jax.Array
    trainable: Leaves
    optimizer: Any


@attrs.frozen
class Computation:
    """The mathematics of a run, without its arrays.

    Attributes:
        policy: The model that is trained.
        reference: The model that it is compared with, or None.
        forward: How a forward pass is computed.
        loss: A `PairLoss` or a `SequenceLoss`.
        optimizer: The update rule.
        curve: The learning rate by step.
        microbatches: In how many parts a batch is computed.
    """

    policy: Template
    reference: Template | None
    forward: Forward
    loss: PairLoss | SequenceLoss
    optimizer: optax.GradientTransformation
    curve: Callable[[Any], Any]
    microbatches: int

    def step(self, moving: Moving, frozen: Leaves, reference: Leaves, batch: Batch) -> tuple[Moving, dict[str, jax.Array]]:
        """One optimizer step.

        Returns:
            What moves, moved, and float32 scalars under the names that TRL gives them, with `num_tokens` (int32) of this
            batch.
        """

        def loss(trainable: Leaves, part: Batch) -> tuple[jax.Array, Terms]:
            terms = self.terms(trainable, frozen, reference, part)
            return terms.loss.total, terms

        def body(carry: tuple[Leaves, Terms], part: Batch) -> tuple[tuple[Leaves, Terms], None]:
            gradients, terms = jax.grad(loss, has_aux=True)(moving.trainable, part)
            return jax.tree.map(jnp.add, carry, (gradients, terms)), None

        parts = jax.tree.map(self._split, batch)
        first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
        shapes = (moving.trainable, jax.eval_shape(loss, moving.trainable, first)[1])
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        (gradients, terms), _ = jax.lax.scan(body, zeros, parts)
        gradients = jax.tree.map(lambda g: _divide(g, terms.loss.count), gradients)
        updates, optimizer = self.optimizer.update(gradients, moving.optimizer, moving.trainable)
        metrics = {
            "loss": _divide(*terms.loss),
            "grad_norm": optax.global_norm(gradients),
            "learning_rate": jnp.asarray(self.curve(moving.step), jnp.float32),
            **{name: _divide(*ratio) for name, ratio in terms.metrics.items()},
            "num_tokens": token_count(batch),
        }
        return Moving(moving.step + 1, optax.apply_updates(moving.trainable, updates), optimizer), metrics

    def evaluate(self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch) -> dict[str, Ratio]:
        """Sums and counts of the loss and every metric of one batch, to be added up over batches before they are divided."""
        terms = self.terms(trainable, frozen, reference, batch)
        return {"loss": terms.loss, **terms.metrics}

    def terms(self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch) -> Terms:
        """The loss's sums over one micro-batch."""
        model = self.policy.merge({**frozen, **self.cast(trainable)})
        if isinstance(batch, PairBatch):
            policy, stats = self.forward.pairs(model, batch)
            terms = self.loss(policy, self._reference_pairs(frozen, reference, batch), batch.weight)
            logps = {"logps/chosen": policy.chosen, "logps/rejected": policy.rejected}
            count = jnp.sum(batch.weight)
            extra = {name: Ratio(jnp.sum(value * batch.weight), count) for name, value in logps.items()}
        else:
            stats = self.forward.sequences(model, batch)
            terms, extra = self.loss(stats, None, batch.weight), {}
        return Terms(terms.loss, {**terms.metrics, **extra, **_token_metrics(stats, batch.weight)})

    def cast(self, trainable: Mapping[str, jax.Array]) -> Leaves:
        """Trainable leaves in the format that is computed in; their gradients come back as float32."""
        return {path: leaf.astype(self.forward.dtype) for path, leaf in trainable.items()}

    def _reference_pairs(self, frozen: Leaves, reference: Leaves, batch: PairBatch) -> Pairs | None:
        if self.reference is None:
            return None
        paths = self.reference.variables
        # Under an adapter the reference is the same frozen base without it: no second copy. Else it is a copy of its own.
        leaves = reference or {path: frozen[path] for path in paths}
        pairs, _ = self.forward.pairs(self.reference.merge(leaves), batch)
        return jax.lax.stop_gradient(pairs)

    def _split(self, x: jax.Array) -> jax.Array:
        """`[B, ...]` as `[microbatches, B / microbatches, ...]`, so that each device keeps rows that it already has."""
        return jnp.moveaxis(x.reshape(-1, self.microbatches, *x.shape[1:]), 1, 0)


def _token_metrics(stats: TokenStats, weight: jax.Array) -> dict[str, Ratio]:
    counted = stats.mask * weight[:, None]
    count = jnp.sum(counted)
    return {
        "entropy": Ratio(jnp.sum(stats.entropy * counted), count),
        "mean_token_accuracy": Ratio(jnp.sum(stats.correct * counted), count),
    }


def _divide(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and exactly zero where nothing was counted."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0.0)
