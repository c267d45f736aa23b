"""Losses of preference pairs, from summed log-probabilities; the class of each documents its formula.

In float32 and in forms that stay finite: `log_sigmoid`, `expm1` and `log1p`, and no exponential that can overflow.
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
"""Of a likelihood ratio: exp(80) and its products with small numbers are float32's still. Scores are flat beyond, as
TRL's are, where a policy gives a completion e^80 times less than its reference."""

LARGEST_SQUARED = 1e18
"""Of a difference of scores: its square, and that times its derivative, are float32's still."""

CERTAIN = -float(jnp.finfo(jnp.float32).eps)
"""The largest mean log-probability whose odds float32 distinguishes from those of probability 1, which are infinite."""


class LogRatios(NamedTuple):
    """What a formula reads of pairs; all float32 `[B]`.

    Attributes:
        chosen: Log-ratio of policy to reference, in nats, summed over the chosen completion.
        rejected: Likewise.
        chosen_tokens: How many tokens that sum has.
        rejected_tokens: Likewise.
    """

    chosen: Array
    rejected: Array
    chosen_tokens: Array
    rejected_tokens: Array


def mask_padding_rows(pairs: PairLogps, weight: Rows) -> PairLogps:
    """Rows of weight 0 replaced by harmless ones, so that not even a NaN in them reaches a gradient."""
    counts = weight > 0
    chosen, rejected = (jnp.where(counts, logp, -1.0) for logp in (pairs.chosen_logps, pairs.rejected_logps))
    lengths = (jnp.where(counts, tokens, 1.0) for tokens in (pairs.chosen_tokens, pairs.rejected_tokens))
    return PairLogps(chosen, rejected, *lengths)


def log_ratios(policy: PairLogps, reference: PairLogps) -> LogRatios:
    """How much likelier the policy finds each completion than the reference does."""
    chosen, rejected = policy.chosen_logps - reference.chosen_logps, policy.rejected_logps - reference.rejected_logps
    return LogRatios(chosen, rejected, policy.chosen_tokens, policy.rejected_tokens)


def with_reward_metrics(loss: Rows, chosen: Rows, rejected: Rows, weight: Rows, **more: Rows) -> LossTerms:
    """Terms of a loss that is a mean over rows, with rewards under TRL's names and further means."""
    metrics = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        **more,
    }
    return per_row(loss, metrics, weight)


# -- with a reference ------------------------------------------------------------------------------------------------


@singledispatch
def score(divergence: Divergence, ratio: Rows) -> Rows:
    """What a divergence makes of log-ratios, 0 where policy and reference are equal; register one of your own here."""
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
    """`exp(x) - 1`, whose derivative is `exp(x)`; jax takes the value plus 1 for it, which far below 0 is lost."""
    return jnp.expm1(x)


_expm1.defjvp(lambda primals, tangents: (jnp.expm1(primals[0]), jnp.exp(primals[0]) * tangents[0]))


def margin_loss(
    objective: MarginObjective, beta: float, of: Callable[[Rows], Rows], *, per_token: bool = False
) -> Loss:
    """The loss of a difference of scores, chosen minus rejected.

    Args:
        objective: Its divergence makes scores of log-ratios, and its weighting the weights of pairs.
        beta: What log-ratios are multiplied by to be rewards.
        of: The loss of a pair by the difference, which is not multiplied by `beta`.
        per_token: Whether scores are divided by the tokens of their completion.
    """

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        pair = _pair(policy, reference, weight)
        chosen, rejected = (score(objective.divergence, ratio) for ratio in (pair.chosen, pair.rejected))
        if per_token:
            chosen, rejected = chosen / pair.chosen_tokens, rejected / pair.rejected_tokens
        each = of(chosen - rejected)
        if objective.weighting == "wpo":
            assert policy.likelihood is not None
            each = each * jax.lax.stop_gradient(jnp.where(weight > 0, policy.likelihood, 0.0))
        return with_reward_metrics(each, beta * pair.chosen, beta * pair.rejected, weight)

    return loss


def pointwise_loss(beta: float, of: Callable[[Rows, Rows], Rows]) -> Loss:
    """The loss of both rewards, `beta` times log-ratios of the chosen and of the rejected completion."""

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        pair = _pair(policy, reference, weight)
        chosen, rejected = beta * pair.chosen, beta * pair.rejected
        return with_reward_metrics(of(chosen, rejected), chosen, rejected, weight)

    return loss


def _pair(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LogRatios:
    if reference is None:  # all answers are as likely: of a difference nothing is left
        nothing = jnp.zeros_like(policy.chosen_logps)
        reference = PairLogps(nothing, nothing, nothing, nothing)
    return log_ratios(mask_padding_rows(policy, weight), mask_padding_rows(reference, weight))


def smoothed(z: Rows, smoothing: float) -> Rows:
    """`-(1 - e) log sigmoid(z) - e log sigmoid(-z)`."""
    return -(1 - smoothing) * jax.nn.log_sigmoid(z) - smoothing * jax.nn.log_sigmoid(-z)


@build.register
def _(objective: spec.DPO) -> Loss:
    beta, smoothing = objective.beta, objective.label_smoothing
    return margin_loss(objective, beta, lambda d: smoothed(beta * d, smoothing))


@build.register
def _(objective: spec.RobustDPO) -> Loss:
    beta, flipped = objective.beta, objective.label_smoothing

    def of(d: Rows) -> Rows:
        right, wrong = -jax.nn.log_sigmoid(beta * d), -jax.nn.log_sigmoid(-beta * d)
        return ((1 - flipped) * right - flipped * wrong) / (1 - 2 * flipped)

    return margin_loss(objective, beta, of)


@build.register
def _(objective: spec.IPO) -> Loss:
    tau = objective.tau

    def of(d: Rows) -> Rows:
        return jnp.square(jnp.clip(d, -LARGEST_SQUARED, LARGEST_SQUARED) - 1 / (2 * tau))

    return margin_loss(objective, tau, of, per_token=True)


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
    beta, swapped = objective.beta, objective.label_smoothing

    def of(d: Rows) -> Rows:
        z = beta * d
        for_chosen = jax.nn.sigmoid(z) * (jax.nn.log_sigmoid(z) - math.log1p(-swapped))
        return for_chosen + jax.nn.sigmoid(-z) * (jax.nn.log_sigmoid(-z) - math.log(swapped))

    return margin_loss(objective, beta, of)


@build.register
def _(objective: spec.DiscoPOP) -> Loss:
    beta, tau = objective.beta, objective.tau

    def of(d: Rows) -> Rows:
        z = beta * d
        logistic = -jax.nn.sigmoid(-z / tau) * jax.nn.log_sigmoid(z)
        return logistic + jnp.exp(jax.nn.log_sigmoid(z / tau) - z)  # in one exponential, which the blend keeps small

    return margin_loss(objective, beta, of)


@build.register
def _(objective: spec.NCA) -> Loss:
    s = jax.nn.log_sigmoid
    return pointwise_loss(objective.beta, lambda chosen, rejected: -s(chosen) - s(-chosen) / 2 - s(-rejected) / 2)


@build.register
def _(objective: spec.BCO) -> Loss:
    s = jax.nn.log_sigmoid
    plain = pointwise_loss(objective.beta, lambda chosen, rejected: -s(chosen) - s(-rejected))
    if objective.shift == "none":
        return plain

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        assert reference is not None
        pair = log_ratios(mask_padding_rows(policy, weight), mask_padding_rows(reference, weight))
        chosen, rejected = objective.beta * pair.chosen, objective.beta * pair.rejected
        both = row_mean(jax.lax.stop_gradient(chosen + rejected) / 2, weight)
        shift = both.total / jnp.maximum(both.count, 1)
        terms = with_reward_metrics(-s(chosen - shift) - s(shift - rejected), chosen, rejected, weight)
        return terms._replace(metrics={**terms.metrics, "reward_shift": WeightedMean(shift * both.count, both.count)})

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

    return _transported(objective.beta, objective.label_smoothing, sides)


@build.register
def _(objective: spec.AOTUnpaired) -> Loss:
    def sides(policy: PairLogps, reference: PairLogps) -> tuple[Rows, Rows]:
        pair = log_ratios(policy, reference)
        return pair.chosen, pair.rejected

    return _transported(objective.beta, objective.label_smoothing, sides)


def _transported(beta: float, smoothing: float, sides: Callable[[PairLogps, PairLogps], tuple[Rows, Rows]]) -> Loss:
    """DPO's loss of the k-th of one side minus the k-th of the other, both sorted over the batch."""

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        assert reference is not None
        policy, reference = mask_padding_rows(policy, weight), mask_padding_rows(reference, weight)
        one, other = (_sorted(side, weight) for side in sides(policy, reference))
        # Rows that count come first on both sides, so weights are sorted likewise.
        counted = jnp.arange(len(weight)) < jnp.sum(weight > 0)
        total = WeightedMean(
            jnp.sum(jnp.where(counted, smoothed(beta * (one - other), smoothing), 0.0)), jnp.sum(weight)
        )
        pair = log_ratios(policy, reference)
        return with_reward_metrics(weight, beta * pair.chosen, beta * pair.rejected, weight)._replace(loss=total)

    return loss


def _sorted(x: Rows, weight: Rows) -> Rows:
    """Values by size, those of rows of weight 0 behind all others."""
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
        more = {"nll_loss": -chosen, "log_odds_ratio": ratio, "log_odds_chosen": log_odds}
        return with_reward_metrics(-chosen - beta * ratio, beta * chosen, beta * rejected, weight, **more)

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
        preferred = -jax.nn.log_sigmoid(chosen - rejected)
        return with_reward_metrics(preferred + alpha * nll, chosen, rejected, weight, nll_loss=nll)

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
    """`x - log(1 - exp(x))` of log-probabilities; those that are 0 within float32 count as the next below."""
    x = jnp.minimum(x, CERTAIN)
    # Each branch where it is exact (Mächler 2012, "Accurately computing log(1 - exp(-|a|))"); the other one is finite.
    near = x > -math.log(2)
    return x - jnp.where(near, jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))


# -- sums --------------------------------------------------------------------------------------------------------------


@build.register
def _(objective: spec.Sum) -> Loss:
    losses, names = [build(term) for term in objective.terms], _names(objective.terms)

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        found = [loss(policy, reference if term.needs_reference else None, weight) for loss, term in parts]
        total = sum(factor * terms.loss.total for factor, terms in zip(objective.weights, found, strict=True))
        metrics: dict[str, WeightedMean] = {}
        for terms in reversed(found):  # the first one's go before the others'
            metrics |= terms.metrics
        own = {f"loss/{name}": terms.loss for name, terms in zip(names, found, strict=True)}
        return LossTerms(WeightedMean(jnp.asarray(total), found[0].loss.count), {**metrics, **own})

    parts = list(zip(losses, objective.terms, strict=True))
    return loss


def _names(terms: tuple[Objective, ...]) -> list[str]:
    """Of the metrics of terms: `DPO`, and where a class is there again `DPO_2`."""
    names = [type(term).__name__ for term in terms]
    counts = [names[: index + 1].count(name) for index, name in enumerate(names)]
    return [name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True)]
