"""Losses of preference pairs (DPO and others), from summed log-probabilities; the class of each documents its formula.

Computed in float32 and in forms that stay finite: `log_sigmoid`, `expm1`, `log1p`, no exponential that can overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import singledispatch
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxdsl.config.objectives import preference as spec
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.divergence import Alpha, Divergence, ForwardKL, JensenShannon, ReverseKL
from nnxdsl.errors import NotRegisteredError
from nnxdsl.losses.base import Loss, LossTerms, PairLogps, WeightedMean, build, per_row, row_mean

Rows = Float[Array, " B"]
MarginObjective = (
    spec.DPO | spec.RobustDPO | spec.IPO | spec.Hinge | spec.LengthNormalizedDPO | spec.EXO | spec.DiscoPOP
)

LARGEST_EXPONENT = 80.0
"""The largest log-ratio that is exponentiated: exp(80) and its products with small numbers are finite in float32.
Scores are constant beyond it, as TRL's are."""

LARGEST_SQUARED = 1e18
"""The largest score difference that is squared: the square, and that times its derivative, are finite in float32."""

MAX_MEAN_LOGP = -float(jnp.finfo(jnp.float32).eps)
"""The largest mean log-probability whose log odds are finite in float32."""


class LogRatios(NamedTuple):
    """Log-ratios of policy to reference, in nats; all float32 `[B]`.

    Attributes:
        chosen: Summed over the tokens of the chosen completion.
        rejected: Summed over the tokens of the rejected completion.
        chosen_tokens: Number of tokens of the chosen completion.
        rejected_tokens: Number of tokens of the rejected completion.
    """

    chosen: Array
    rejected: Array
    chosen_tokens: Array
    rejected_tokens: Array


def mask_padding_rows(pairs: PairLogps, weight: Rows) -> PairLogps:
    """Replace rows of weight 0, so that not even a NaN in them reaches a gradient."""
    counts = weight > 0
    chosen, rejected = (jnp.where(counts, logp, -1.0) for logp in (pairs.chosen_logps, pairs.rejected_logps))
    lengths = (jnp.where(counts, tokens, 1.0) for tokens in (pairs.chosen_tokens, pairs.rejected_tokens))
    return PairLogps(chosen, rejected, *lengths)


def log_ratios(policy: PairLogps, reference: PairLogps) -> LogRatios:
    """Log-ratios of policy to reference of both completions."""
    chosen, rejected = policy.chosen_logps - reference.chosen_logps, policy.rejected_logps - reference.rejected_logps
    return LogRatios(chosen, rejected, policy.chosen_tokens, policy.rejected_tokens)


def with_reward_metrics(loss: Rows, chosen: Rows, rejected: Rows, weight: Rows, **metrics: Rows) -> LossTerms:
    """Terms of a loss that is a mean over rows, with rewards under TRL's names and further metrics."""
    rewards = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
    }
    return per_row(loss, {**rewards, **metrics}, weight)


# -- with a reference ------------------------------------------------------------------------------------------------


@singledispatch
def score(divergence: Divergence, ratio: Rows) -> Rows:
    """The score of log-ratios under a divergence, 0 where policy and reference are equal; register your own here."""
    name = type(divergence).__qualname__
    raise NotRegisteredError(
        f"no score is registered for {name}; write\n"
        f"  from nnxdsl.losses import preference\n"
        f"  @preference.score.register({name})\n"
        f"  def _(divergence, ratio): return ..."
    )


@score.register
def _(divergence: ReverseKL, ratio: Rows) -> Rows:
    return ratio


@score.register
def _(divergence: ForwardKL, ratio: Rows) -> Rows:
    return -_expm1(jnp.minimum(-ratio, LARGEST_EXPONENT))


@score.register
def _(divergence: JensenShannon, ratio: Rows) -> Rows:
    return math.log(2) + jax.nn.log_sigmoid(ratio)


@score.register
def _(divergence: Alpha, ratio: Rows) -> Rows:
    return -_expm1(jnp.minimum(-divergence.alpha * ratio, LARGEST_EXPONENT)) / divergence.alpha


@jax.custom_jvp
def _expm1(x: Rows) -> Rows:
    """`exp(x) - 1` with the derivative `exp(x)`; jax's own, the value plus 1, is 0 for large negative `x`."""
    return jnp.expm1(x)


_expm1.defjvp(lambda primals, tangents: (jnp.expm1(primals[0]), jnp.exp(primals[0]) * tangents[0]))


def margin_loss(
    objective: MarginObjective, beta: float, pair_loss: Callable[[Rows], Rows], *, per_token: bool = False
) -> Loss:
    """The loss of a score difference, chosen minus rejected.

    Args:
        objective: Its divergence turns log-ratios into scores, its weighting weighs pairs.
        beta: The factor from log-ratios to rewards.
        pair_loss: The loss of a pair as a function of the difference, which is not multiplied by `beta`.
        per_token: Whether scores are divided by the number of tokens of their completion.
    """

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        pair = _pair(policy, reference, weight)
        chosen, rejected = (score(objective.divergence, ratio) for ratio in (pair.chosen, pair.rejected))
        if per_token:
            chosen, rejected = chosen / pair.chosen_tokens, rejected / pair.rejected_tokens
        losses = pair_loss(chosen - rejected)
        if objective.weighting == "wpo":
            assert policy.likelihood is not None
            losses = losses * jax.lax.stop_gradient(jnp.where(weight > 0, policy.likelihood, 0.0))
        return with_reward_metrics(losses, beta * pair.chosen, beta * pair.rejected, weight)

    return loss


def pointwise_loss(beta: float, pair_loss: Callable[[Rows, Rows], Rows]) -> Loss:
    """The loss of both rewards, `beta` times the log-ratios of the chosen and the rejected completion."""

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        pair = _pair(policy, reference, weight)
        chosen, rejected = beta * pair.chosen, beta * pair.rejected
        return with_reward_metrics(pair_loss(chosen, rejected), chosen, rejected, weight)

    return loss


def _pair(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LogRatios:
    if reference is None:  # a uniform reference
        zeros = jnp.zeros_like(policy.chosen_logps)
        reference = PairLogps(zeros, zeros, zeros, zeros)
    return log_ratios(mask_padding_rows(policy, weight), mask_padding_rows(reference, weight))


def smoothed(z: Rows, smoothing: float) -> Rows:
    """The label-smoothed logistic loss, `-(1 - e) log sigmoid(z) - e log sigmoid(-z)`."""
    return -(1 - smoothing) * jax.nn.log_sigmoid(z) - smoothing * jax.nn.log_sigmoid(-z)


@build.register
def _(objective: spec.DPO) -> Loss:
    beta, smoothing = objective.beta, objective.label_smoothing
    return margin_loss(objective, beta, lambda d: smoothed(beta * d, smoothing))


@build.register
def _(objective: spec.RobustDPO) -> Loss:
    beta, smoothing = objective.beta, objective.label_smoothing

    def pair_loss(d: Rows) -> Rows:
        labelled, flipped = -jax.nn.log_sigmoid(beta * d), -jax.nn.log_sigmoid(-beta * d)
        return ((1 - smoothing) * labelled - smoothing * flipped) / (1 - 2 * smoothing)

    return margin_loss(objective, beta, pair_loss)


@build.register
def _(objective: spec.IPO) -> Loss:
    tau = objective.tau

    def pair_loss(d: Rows) -> Rows:
        return jnp.square(jnp.clip(d, -LARGEST_SQUARED, LARGEST_SQUARED) - 1 / (2 * tau))

    return margin_loss(objective, tau, pair_loss, per_token=True)


@build.register
def _(objective: spec.Hinge) -> Loss:
    beta = objective.beta
    return margin_loss(objective, beta, lambda d: jax.nn.relu(1 - beta * d))


@build.register
def _(objective: spec.LengthNormalizedDPO) -> Loss:
    beta = objective.beta
    return margin_loss(objective, beta, lambda d: -jax.nn.log_sigmoid(beta * d), per_token=True)


@build.register
def _(objective: spec.EXO) -> Loss:
    beta, smoothing = objective.beta, objective.label_smoothing

    def pair_loss(d: Rows) -> Rows:
        z = beta * d
        for_chosen = jax.nn.sigmoid(z) * (jax.nn.log_sigmoid(z) - math.log1p(-smoothing))
        return for_chosen + jax.nn.sigmoid(-z) * (jax.nn.log_sigmoid(-z) - math.log(smoothing))

    return margin_loss(objective, beta, pair_loss)


@build.register
def _(objective: spec.DiscoPOP) -> Loss:
    beta, tau = objective.beta, objective.tau

    def pair_loss(d: Rows) -> Rows:
        z = beta * d
        logistic = -jax.nn.sigmoid(-z / tau) * jax.nn.log_sigmoid(z)
        return logistic + jnp.exp(jax.nn.log_sigmoid(z / tau) - z)  # in one exponential, which the blend keeps small

    return margin_loss(objective, beta, pair_loss)


@build.register
def _(objective: spec.NCA) -> Loss:
    s = jax.nn.log_sigmoid
    return pointwise_loss(objective.beta, lambda chosen, rejected: -s(chosen) - s(-chosen) / 2 - s(-rejected) / 2)


@build.register
def _(objective: spec.BCO) -> Loss:
    s = jax.nn.log_sigmoid
    unshifted = pointwise_loss(objective.beta, lambda chosen, rejected: -s(chosen) - s(-rejected))
    if objective.shift == "none":
        return unshifted

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        assert reference is not None
        pair = log_ratios(mask_padding_rows(policy, weight), mask_padding_rows(reference, weight))
        chosen, rejected = objective.beta * pair.chosen, objective.beta * pair.rejected
        mean = row_mean(jax.lax.stop_gradient(chosen + rejected) / 2, weight)
        shift = mean.total / jnp.maximum(mean.count, 1)
        terms = with_reward_metrics(-s(chosen - shift) - s(shift - rejected), chosen, rejected, weight)
        return terms._replace(metrics={**terms.metrics, "reward_shift": WeightedMean(shift * mean.count, mean.count)})

    return loss


@build.register
def _(objective: spec.SPPO) -> Loss:
    beta = objective.beta
    # (c - 1 / (2 beta))^2 with c = chosen / beta.
    return pointwise_loss(
        beta, lambda chosen, rejected: (jnp.square(chosen - 0.5) + jnp.square(rejected + 0.5)) / beta**2
    )


@build.register
def _(objective: spec.APOZero) -> Loss:
    return pointwise_loss(objective.beta, lambda chosen, rejected: jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected))


@build.register
def _(objective: spec.APODown) -> Loss:
    return pointwise_loss(
        objective.beta, lambda chosen, rejected: jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)
    )


@build.register
def _(objective: spec.AOT) -> Loss:
    def sides(policy: PairLogps, reference: PairLogps) -> tuple[Rows, Rows]:
        return policy.chosen_logps - policy.rejected_logps, reference.chosen_logps - reference.rejected_logps

    return _aot(objective.beta, objective.label_smoothing, sides)


@build.register
def _(objective: spec.AOTUnpaired) -> Loss:
    def sides(policy: PairLogps, reference: PairLogps) -> tuple[Rows, Rows]:
        pair = log_ratios(policy, reference)
        return pair.chosen, pair.rejected

    return _aot(objective.beta, objective.label_smoothing, sides)


def _aot(beta: float, smoothing: float, sides: Callable[[PairLogps, PairLogps], tuple[Rows, Rows]]) -> Loss:
    """The DPO loss of the k-th value of one side minus the k-th of the other, both sorted over the batch."""

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        assert reference is not None
        policy, reference = mask_padding_rows(policy, weight), mask_padding_rows(reference, weight)
        first, second = (_sorted(side, weight) for side in sides(policy, reference))
        # Rows of weight 0 come last on both sides, so the first rows are those that count.
        counted = jnp.arange(len(weight)) < jnp.sum(weight > 0)
        total = WeightedMean(
            jnp.sum(jnp.where(counted, smoothed(beta * (first - second), smoothing), 0.0)), jnp.sum(weight)
        )
        pair = log_ratios(policy, reference)
        return with_reward_metrics(weight, beta * pair.chosen, beta * pair.rejected, weight)._replace(loss=total)

    return loss


def _sorted(x: Rows, weight: Rows) -> Rows:
    """Values in ascending order, those of rows of weight 0 last."""
    order = jnp.argsort(jnp.where(weight > 0, jax.lax.stop_gradient(x), jnp.inf), stable=True)
    return x[order]


# -- without a reference ---------------------------------------------------------------------------------------------


@build.register
def _(objective: spec.ORPO) -> Loss:
    beta = objective.beta

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        chosen, rejected = _means(policy, weight)
        log_odds = _log_odds(chosen) - _log_odds(rejected)
        ratio = jax.nn.log_sigmoid(log_odds)
        metrics = {"nll_loss": -chosen, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}
        return with_reward_metrics(-chosen - beta * ratio, beta * chosen, beta * rejected, weight, **metrics)

    return loss


@build.register
def _(objective: spec.SimPO) -> Loss:
    beta, gamma = objective.beta, objective.gamma

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        chosen, rejected = (beta * mean for mean in _means(policy, weight))
        return with_reward_metrics(-jax.nn.log_sigmoid(chosen - rejected - gamma), chosen, rejected, weight)

    return loss


@build.register
def _(objective: spec.CPO) -> Loss:
    beta, alpha = objective.beta, objective.alpha

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        policy = mask_padding_rows(policy, weight)
        chosen, rejected, nll = (
            beta * policy.chosen_logps,
            beta * policy.rejected_logps,
            -policy.chosen_logps / policy.chosen_tokens,
        )
        preference = -jax.nn.log_sigmoid(chosen - rejected)
        return with_reward_metrics(preference + alpha * nll, chosen, rejected, weight, nll_loss=nll)

    return loss


@build.register
def _(objective: spec.ChosenSFT) -> Loss:
    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        chosen, _ = _means(policy, weight)
        return per_row(-chosen, {}, weight)

    return loss


def _means(policy: PairLogps, weight: Rows) -> tuple[Rows, Rows]:
    """Mean log-probabilities of the tokens of both completions."""
    policy = mask_padding_rows(policy, weight)
    return policy.chosen_logps / policy.chosen_tokens, policy.rejected_logps / policy.rejected_tokens


def _log_odds(x: Rows) -> Rows:
    """`x - log(1 - exp(x))` of log-probabilities, which are clipped to `MAX_MEAN_LOGP`."""
    x = jnp.minimum(x, MAX_MEAN_LOGP)
    # Each branch is used where it is exact (Mächler 2012, "Accurately computing log(1 - exp(-|a|))").
    near = x > -math.log(2)
    return x - jnp.where(near, jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))


# -- sums --------------------------------------------------------------------------------------------------------------


@build.register
def _(objective: spec.Sum) -> Loss:
    losses, names = [build(term) for term in objective.terms], _names(objective.terms)

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        computed = [
            term_loss(policy, reference if term.needs_reference else None, weight)
            for term_loss, term in zip(losses, objective.terms, strict=True)
        ]
        total = sum(factor * terms.loss.total for factor, terms in zip(objective.weights, computed, strict=True))
        metrics: dict[str, WeightedMean] = {}
        for terms in reversed(computed):  # of equal names, the first term's metric is reported
            metrics |= terms.metrics
        metrics |= {f"loss/{name}": terms.loss for name, terms in zip(names, computed, strict=True)}
        return LossTerms(WeightedMean(jnp.asarray(total), computed[0].loss.count), metrics)

    return loss


def _names(terms: tuple[Objective, ...]) -> list[str]:
    """Names of terms in metrics: `DPO`, and `DPO_2` for the second term of that class."""
    names = [type(term).__name__ for term in terms]
    counts = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True)]
