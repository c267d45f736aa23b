"""The loss that training minimizes: the objective's, and auxiliary losses of MTP, entropies, routers and indexers."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import jax
import jax.numpy as jnp

from nnxdsl import losses
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.policy_gradient import MeanOver, PolicyGradient
from nnxdsl.data.batch import Batch, GroupBatch, RolloutBatch
from nnxdsl.losses.base import Loss, LossTerms, WeightedMean
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.losses.policy_gradient import RolloutOutputs, divisor
from nnxdsl.models.moe.router import load_balance
from nnxdsl.models.params import is_indexer_param
from nnxdsl.program import heads
from nnxdsl.program.batches import LossInputs, kind_of
from nnxdsl.program.forward import ForwardOutput
from nnxdsl.program.heads import Head


@attrs.frozen
class AuxLoss:
    """An auxiliary loss, a mean that is added to the objective's loss; its metric is not multiplied by `coef`.

    Attributes:
        coef: Its weight.
    """

    coef: float

    name: ClassVar[str]
    """Its metric."""
    is_evaluated: ClassVar[bool] = True
    """Whether evaluation reports its metric."""
    is_separate: ClassVar[bool] = False
    """Whether it trains arrays that no other loss trains, so that its own count is the divisor of their gradients."""

    def mean(self, out: ForwardOutput) -> WeightedMean | None:
        """Sum and count of a micro-batch; None where the forward pass did not compute its statistics."""
        raise NotImplementedError

    def for_batch(self, batch: Batch) -> AuxLoss:
        """The loss of micro-batches of `batch`."""
        return self

    def total(self, mean: WeightedMean, count: jax.Array, batch: Batch) -> jax.Array:
        """The sum that is added to the objective's, of which `count` is the divisor."""
        raise NotImplementedError

    def trains(self, path: str) -> bool:
        """Whether this loss alone trains an array; asked where `is_separate`."""
        return False


@attrs.frozen
class TokenLoss(AuxLoss):
    """An auxiliary loss that is a mean over tokens of the whole batch, whatever its micro-batches.

    Attributes:
        scale: The count of the objective's loss over that of this one, of the whole batch; None: of the micro-batch.
    """

    scale: jax.Array | None = None

    def for_batch(self, batch: Batch) -> TokenLoss:
        """The loss of micro-batches of `batch`, scaled by the counts of the whole batch."""
        return attrs.evolve(self, scale=divide(*self.counts(batch)))

    def total(self, mean: WeightedMean, count: jax.Array, batch: Batch) -> jax.Array:
        """The sum in units of the objective's count: linear, so that micro-batches add up to the batch."""
        return self.coef * (divide(*self.counts(batch)) if self.scale is None else self.scale) * mean.total

    def counts(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The counts of a batch by which the objective's loss and this one are divided."""
        raise NotImplementedError


@attrs.frozen
class MTPLoss(TokenLoss):
    """The cross-entropy of multi-token prediction, a mean over its own targets.

    Attributes:
        is_token_sum: Whether the objective's loss is a mean over target tokens, or else over rows.
    """

    is_token_sum: bool = attrs.field(default=False, kw_only=True)

    name: ClassVar[str] = "mtp_loss"

    def mean(self, out: ForwardOutput) -> WeightedMean | None:
        """Negative log-probabilities of the targets two tokens ahead."""
        if out.mtp_stats is None:
            return None
        counted = out.mtp_stats.mask
        return WeightedMean(-jnp.sum(out.mtp_stats.logp * counted), jnp.sum(counted))

    def counts(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Targets of the objective, or rows; targets two tokens ahead."""
        kind, weight = kind_of(batch), jnp.asarray(batch.weight)
        count = jnp.sum(kind.target_mask(batch) * weight[:, None]) if self.is_token_sum else jnp.sum(weight)
        return count, jnp.sum(kind.mtp_mask(batch))


@attrs.frozen
class EntropyBonus(TokenLoss):
    """The mean entropy of the tokens that a policy term has; its weight is below zero.

    Attributes:
        mean_over: What the objective's loss is a mean over.
    """

    mean_over: MeanOver = attrs.field(default="completions", kw_only=True)

    name: ClassVar[str] = "entropy_bonus"
    is_evaluated: ClassVar[bool] = False

    def mean(self, out: ForwardOutput) -> WeightedMean | None:
        """Entropies in nats."""
        assert isinstance(out.loss_inputs, RolloutOutputs)
        assert out.token_stats is not None
        counted = out.token_stats.mask
        if out.loss_inputs.entropy_mask is not None:
            counted = counted * out.loss_inputs.entropy_mask
        return WeightedMean(jnp.sum(out.token_stats.entropy * counted), jnp.sum(counted))

    def counts(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The divisor of the policy's loss; tokens with a bonus."""
        assert isinstance(batch, RolloutBatch | GroupBatch)
        weight = jnp.asarray(batch.weight)
        mask = batch.loss_mask * weight[..., None]
        has_bonus = mask if batch.entropy_mask is None else mask * batch.entropy_mask
        return divisor(self.mean_over, mask, batch.max_completion_length, weight), jnp.sum(has_bonus)


@attrs.frozen
class RouterLoss(AuxLoss):
    """The load-balancing loss of routers; `aux_loss` is TRL's name of its metric."""

    name: ClassVar[str] = "aux_loss"
    is_evaluated: ClassVar[bool] = False

    def mean(self, out: ForwardOutput) -> WeightedMean | None:
        """The load-balancing loss over all layers."""
        return None if out.router_stats is None else WeightedMean(*load_balance(out.router_stats))

    def total(self, mean: WeightedMean, count: jax.Array, batch: Batch) -> jax.Array:
        """The mean of the micro-batch times the objective's count."""
        return self.coef * count * divide(*mean)


@attrs.frozen
class IndexerLoss(AuxLoss):
    """The KL divergence of indexers from attention, in nats: it alone trains indexers, and nothing else."""

    name: ClassVar[str] = "indexer_loss"
    is_separate: ClassVar[bool] = True

    def mean(self, out: ForwardOutput) -> WeightedMean | None:
        """Divergences summed over the tokens of all layers with an indexer."""
        return None if out.indexer_stats is None else WeightedMean(*out.indexer_stats)

    def trains(self, path: str) -> bool:
        """Whether an array is an indexer's."""
        return is_indexer_param(path)


def aux_losses(experiment: Experiment) -> tuple[AuxLoss, ...]:
    """The auxiliary losses of an experiment: those with a coefficient above zero."""
    every = (
        MTPLoss(experiment.mtp_loss_weight, is_token_sum=experiment.objective.is_token_sum),
        RouterLoss(experiment.router_aux_loss_coef),
        IndexerLoss(experiment.indexer_loss_coef),
    )
    terms = tuple(aux for aux in every if aux.coef)
    objective = experiment.objective
    if isinstance(objective, PolicyGradient) and objective.has_entropy_bonus:
        return *terms, EntropyBonus(-objective.entropy_coef, mean_over=objective.mean_over)
    return terms


@attrs.frozen
class LossFn:
    """The loss of a micro-batch from forward outputs; knows no model.

    Attributes:
        objective: The loss of the objective.
        head: The head that gives its inputs.
        aux: Auxiliary losses.
    """

    objective: Loss
    head: Head
    aux: tuple[AuxLoss, ...] = ()

    def for_batch(self, batch: Batch) -> LossFn:
        """The loss of micro-batches of `batch`, whose counts are those of the whole batch."""
        aux = tuple(aux.for_batch(batch) for aux in self.aux)
        is_same = all(new is old for new, old in zip(aux, self.aux, strict=True))
        return self if is_same else attrs.evolve(self, aux=aux)

    def with_coef(self, name: str, coef: jax.Array) -> LossFn:
        """The loss with another weight of the auxiliary loss of that name."""
        aux: Any = tuple(attrs.evolve(aux, coef=coef) if aux.name == name else aux for aux in self.aux)
        return attrs.evolve(self, aux=aux)

    def __call__(self, out: ForwardOutput, reference: LossInputs | None, batch: Batch) -> LossTerms:
        """The terms that training minimizes, as sums over a micro-batch.

        Args:
            out: Forward outputs of the policy.
            reference: Loss inputs of the reference; None without a reference.
            batch: The micro-batch.
        """
        terms = self.evaluate(out, reference, batch)
        total, metrics = terms.loss.total, dict(terms.metrics)
        for aux in self.aux:
            mean = aux.mean(out)
            if mean is None:
                continue
            metrics[aux.name] = mean
            if not aux.is_separate:
                total = total + aux.total(mean, terms.loss.count, batch)
        return terms._replace(loss=WeightedMean(total, terms.loss.count), metrics=metrics)

    def evaluate(self, out: ForwardOutput, reference: LossInputs | None, batch: Batch) -> LossTerms:
        """The terms of the objective alone, with token metrics and auxiliary metrics; arguments as of `__call__`."""
        weight = batch.weight.reshape(-1)
        terms = self.objective(out.loss_inputs, reference, weight)
        metrics = self.head.metrics(kind_of(batch), out.loss_inputs, weight)
        for aux in self.aux:
            if aux.is_evaluated and (mean := aux.mean(out)) is not None:
                metrics[aux.name] = mean
        metrics = {**metrics, **terms.metrics, **_token_metrics(out.token_stats)}
        return terms._replace(metrics=metrics, max_logits=out.max_logits)

    def minimized(self, terms: LossTerms) -> jax.Array:
        """The sum whose gradients, each divided by `divisor`, are those of `mean`."""
        return sum((aux.coef * mean.total for aux, mean in self._separate(terms)), terms.loss.total)

    def divisor(self, path: str, terms: LossTerms) -> jax.Array:
        """The divisor of an array's gradient: the count of the loss that trains it."""
        counts = (mean.count for aux, mean in self._separate(terms) if aux.trains(path))
        return next(counts, terms.loss.count)

    def mean(self, terms: LossTerms) -> jax.Array:
        """The loss of a whole batch, from the sums of its micro-batches."""
        return sum((aux.coef * divide(*mean) for aux, mean in self._separate(terms)), divide(*terms.loss))

    def _separate(self, terms: LossTerms) -> list[tuple[AuxLoss, WeightedMean]]:
        """Auxiliary losses with a divisor of their own, and their means."""
        return [(aux, terms.metrics[aux.name]) for aux in self.aux if aux.is_separate and aux.name in terms.metrics]

    def zeros(self, out: ForwardOutput, reference: LossInputs | None, batch: Batch) -> LossTerms:
        """Zeros in the form of the terms, -inf for maxima; `out` and `reference` may be abstract."""
        return jax.eval_shape(self.__call__, out, reference, batch).zeros()


def build_loss(experiment: Experiment) -> LossFn:
    """The loss of an experiment."""
    objective = experiment.objective
    return LossFn(losses.build(objective), heads.build(objective), aux_losses(experiment))


def divide(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and exactly zero where nothing was counted."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0.0)


def mean_or_nan(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and NaN where nothing was counted: a metric that this batch does not have."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), jnp.nan)


def zeros_like(shapes: Any) -> Any:
    """Zeros of the shapes and dtypes of a tree, whose leaves may be abstract."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _token_metrics(stats: TokenStats | None) -> dict[str, WeightedMean]:
    if stats is None:
        return {}
    count = jnp.sum(stats.mask)
    return {
        "entropy": WeightedMean(jnp.sum(stats.entropy * stats.mask), count),
        "mean_token_accuracy": WeightedMean(jnp.sum(stats.correct * stats.mask), count),
    }
