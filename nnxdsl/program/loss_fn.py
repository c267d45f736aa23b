"""What is minimised: the losses of the objective, multi-token prediction, routers and indexers, as sums and counts."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.data.batch import Batch
from nnxdsl.losses.base import Loss, LossTerms, PairLogps, WeightedMean, row_mean
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.models.moe.router import load_balance
from nnxdsl.models.params import is_indexer_param
from nnxdsl.program.batches import LossInputs, kind_of
from nnxdsl.program.forward import ForwardOutput

INDEXER_LOSS = "indexer_loss"
"""The metric of the loss of indexers, a mean over the tokens of all layers, in nats."""


@attrs.frozen
class LossFn:
    """The loss of a micro-batch from forward outputs; knows no model.

    The losses of multi-token prediction and of routers belong to the batch as a whole. They are added with the count of
    the objective's own loss, so that dividing by that count, once, leaves them as they are. The loss of indexers trains
    no array that the others train, so it has its own count.

    Attributes:
        objective: The loss of the objective.
        router_aux_loss_coef: Weight of the routers' load-balancing loss.
        mtp_loss_weight: Weight of the multi-token-prediction loss.
        indexer_loss_coef: Weight of the loss of indexers, which alone trains them, and nothing else.
        is_token_sum: Whether the objective's loss is a mean over target tokens, or else over rows.
        mtp_scale: What the objective's loss of the whole batch is divided by, over what that of multi-token prediction
            is; None: computed from the micro-batch.
    """

    objective: Loss
    router_aux_loss_coef: float = 0.0
    mtp_loss_weight: float = 0.0
    indexer_loss_coef: float = 0.0
    is_token_sum: bool = False
    mtp_scale: jax.Array | None = None

    def for_batch(self, batch: Batch) -> LossFn:
        """The loss of micro-batches of `batch`, whose counts are those of the whole batch."""
        return attrs.evolve(self, mtp_scale=self._mtp_scale(batch)) if self.mtp_loss_weight else self

    def __call__(self, out: ForwardOutput, reference: LossInputs | None, batch: Batch) -> LossTerms:
        """The terms that training minimises: the sum over a micro-batch.

        The metric of the load-balancing loss is `aux_loss`, TRL's name; it is not multiplied by its coefficient.

        Args:
            out: Forward outputs of the policy.
            reference: Those of the reference that the objective reads; None without a reference.
            batch: The micro-batch.
        """
        terms = self.evaluate(out, reference, batch)
        if out.mtp_stats is not None:
            # A mean over targets of its own, though the sum is divided by the count of the objective's loss.
            scale = self._mtp_scale(batch) if self.mtp_scale is None else self.mtp_scale
            more = self.mtp_loss_weight * scale * terms.metrics["mtp_loss"].total
            terms = terms._replace(loss=WeightedMean(terms.loss.total + more, terms.loss.count))
        if out.router_stats is None:
            return terms
        aux_loss = load_balance(out.router_stats)
        loss = terms.loss.total + self.router_aux_loss_coef * terms.loss.count * divide(*aux_loss)
        metrics = {**terms.metrics, "aux_loss": WeightedMean(*aux_loss)}
        return terms._replace(loss=WeightedMean(loss, terms.loss.count), metrics=metrics)

    def evaluate(self, out: ForwardOutput, reference: LossInputs | None, batch: Batch) -> LossTerms:
        """The terms of the objective alone, with the metrics of tokens; arguments as of `__call__`."""
        weight = batch.weight.reshape(-1)
        terms = self.objective(out.loss_inputs, reference, weight)
        metrics: dict[str, WeightedMean] = {}
        if isinstance(out.loss_inputs, PairLogps):
            logps = {"logps/chosen": out.loss_inputs.chosen_logps, "logps/rejected": out.loss_inputs.rejected_logps}
            metrics = {name: row_mean(value, weight) for name, value in logps.items()}
        if out.mtp_stats is not None:
            counted = out.mtp_stats.mask
            metrics["mtp_loss"] = WeightedMean(-jnp.sum(out.mtp_stats.logp * counted), jnp.sum(counted))
        if out.indexer_stats is not None:
            metrics[INDEXER_LOSS] = WeightedMean(*out.indexer_stats)
        metrics = {**metrics, **terms.metrics, **_token_metrics(out.token_stats)}
        return LossTerms(terms.loss, metrics, out.max_logits)

    def minimized(self, terms: LossTerms) -> jax.Array:
        """The sum whose gradients, each divided by `divisor`, are those of `mean`."""
        indexer = terms.metrics.get(INDEXER_LOSS)
        return terms.loss.total if indexer is None else terms.loss.total + self.indexer_loss_coef * indexer.total

    def divisor(self, path: str, terms: LossTerms) -> jax.Array:
        """What the gradient of an array is divided by: the count of the loss that trains it."""
        return terms.metrics[INDEXER_LOSS].count if is_indexer_param(path) else terms.loss.count

    def mean(self, terms: LossTerms) -> jax.Array:
        """The loss of a whole batch, from the sums of its micro-batches."""
        indexer, loss = terms.metrics.get(INDEXER_LOSS), divide(*terms.loss)
        return loss if indexer is None else loss + self.indexer_loss_coef * divide(*indexer)

    def zeros(self, out: ForwardOutput, reference: LossInputs | None, batch: Batch) -> LossTerms:
        """Zeros in the form of the terms, -inf where the largest is kept; `out` and `reference` may be abstract."""
        terms = zeros_like(jax.eval_shape(self.__call__, out, reference, batch))
        return terms._replace(max_logits=jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), terms.max_logits))

    def _mtp_scale(self, batch: Batch) -> jax.Array:
        kind, weight = kind_of(batch), jnp.asarray(batch.weight)
        count = jnp.sum(kind.target_mask(batch) * weight[:, None]) if self.is_token_sum else jnp.sum(weight)
        return divide(count, jnp.sum(kind.mtp_mask(batch)))


def divide(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and exactly zero where nothing was counted."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0.0)


def mean_or_nan(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and NaN where nothing was counted: a metric that this batch does not have."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), jnp.nan)


def zeros_like(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a tree, whose leaves may be abstract."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _token_metrics(stats: TokenStats) -> dict[str, WeightedMean]:
    count = jnp.sum(stats.mask)
    return {
        "entropy": WeightedMean(jnp.sum(stats.entropy * stats.mask), count),
        "mean_token_accuracy": WeightedMean(jnp.sum(stats.correct * stats.mask), count),
    }
