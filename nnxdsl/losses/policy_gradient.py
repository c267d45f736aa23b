"""Losses of a policy's own completions, from log-probabilities and advantages; formulas are with each objective.

An algorithm is two functions, the ratio of probabilities to those of sampling (per token or per completion) and the
surrogate (what a token's ratio and advantage cost), and what the loss is a mean over.
"""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxdsl.config.objectives import policy_gradient as config
from nnxdsl.config.objectives.policy_gradient import KLEstimator, MeanOver
from nnxdsl.losses.base import Loss, LossTerms, WeightedMean, build
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.losses.sampler_weights import lengths, sampler_weights


class RolloutOutputs(NamedTuple):
    """One model's log-probabilities of completions that a policy has sampled.

    Attributes:
        stats: Of each of their tokens, `[B, N]`.
        advantages: Of each token, `[B, N]`.
        max_completion_length: The most tokens that a completion could have had, `[B]`.
        old_logps: Log-probabilities of the tokens when they were sampled, `[B, N]`; None: those of the policy as it is.
        sampler_logps: The same as the sampler computed them, `[B, N]`; None if it gave none.
        entropy_mask: Which tokens the policy term has, `[B, N]`; None for all.
    """

    stats: TokenStats
    advantages: Array
    max_completion_length: Array
    old_logps: Array | None
    sampler_logps: Array | None = None
    entropy_mask: Array | None = None


LEAST_RATIO = 1e-8
"""Of a completion, in VESPO."""


class Tokens(NamedTuple):
    """The tokens of a micro-batch, float32 `[B, N]`.

    Attributes:
        logps: Log-probabilities under the policy.
        old_logps: Log-probabilities when they were sampled; no gradient.
        advantages: Advantages.
        mask: The weight of the completion where a token counts, else 0.
        correction: Importance weights against the sampler, `[B, N]` or `[B, 1]`, of a surrogate that reads them; else
            None.
    """

    logps: Array
    old_logps: Array
    advantages: Array
    mask: Array
    correction: Array | None = None


class Surrogate(NamedTuple):
    """The loss of each token.

    Attributes:
        loss: `[B, N]`, or `[B, 1]` for one value per completion.
        metrics: Booleans or numbers of the same shape, of which means are reported.
    """

    loss: Array
    metrics: dict[str, Array]


LogRatio = Callable[[Tokens], Array]
"""Log of the ratio of probabilities under the policy to those of sampling, `[B, N]` or `[B, 1]`."""

SurrogateFn = Callable[[Array, Tokens], Surrogate]
"""From log-ratios to the loss of each token."""


def policy_gradient(
    objective: config.PolicyGradient, log_ratio: LogRatio, surrogate: SurrogateFn, *, reads_correction: bool = False
) -> Loss:
    """The loss of an objective from its two functions, with its KL term.

    Args:
        objective: The objective.
        log_ratio: See `LogRatio`.
        surrogate: See `SurrogateFn`.
        reads_correction: Whether the surrogate has importance weights in its ratio; else they weigh its loss.
    """

    def loss(policy: RolloutOutputs, reference: RolloutOutputs | None, weight: jax.Array) -> LossTerms:
        logps, mask = policy.stats.logp, policy.stats.mask * weight[:, None]
        old_logps = jax.lax.stop_gradient(logps) if policy.old_logps is None else policy.old_logps
        corrections = sampler_weights(objective, policy.sampler_logps, logps, old_logps, policy.advantages, mask)
        in_ratio, factor = (corrections.correction, None) if reads_correction else (None, corrections.correction)
        tokens = Tokens(logps, old_logps, policy.advantages, mask, in_ratio)
        log_ratios = log_ratio(tokens)
        per_token, metrics = surrogate(log_ratios, tokens)
        for weights in (factor, corrections.row_mask, policy.entropy_mask):
            per_token = per_token if weights is None else per_token * weights
        metrics = {**({} if policy.old_logps is None else metrics), **corrections.metrics}
        if reference is not None:
            metrics["kl"], term = _kl_terms(objective, logps - reference.stats.logp, log_ratios)
            per_token = per_token + term
        means = {name: _mean(value, mask, weight) for name, value in metrics.items()}
        total = aggregated(objective.mean_over, per_token * mask, mask, policy, weight)
        if objective.entropy_coef:
            means["policy_loss"] = total
        return LossTerms(total, means, maxima=corrections.maxima)

    return loss


def _mean(value: jax.Array, mask: jax.Array, weight: jax.Array) -> WeightedMean:
    """The mean of `[B, N]` over tokens, or of `[B, 1]` over completions."""
    counted = weight[:, None] if value.shape[1] == 1 else mask
    return WeightedMean(jnp.sum(value * counted), jnp.sum(counted))


def _kl_terms(
    objective: config.PolicyGradient, log_ratios: jax.Array, old_log_ratios: jax.Array
) -> tuple[jax.Array, jax.Array | float]:
    """The estimate that is reported, and what each token's loss gets: 0 where the reward has the KL divergence."""
    if not isinstance(objective, config.KLInLoss):
        return kl("k1", log_ratios), 0.0
    estimate = kl(objective.kl_estimator, log_ratios)
    if objective.use_bias_correction_kl:
        estimate = estimate * jnp.exp(old_log_ratios)
    return estimate, objective.beta * estimate


def kl(estimator: KLEstimator, log_ratios: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """An estimate of the KL divergence of the policy from the reference, of tokens that the policy has sampled.

    Args:
        estimator: Which; see `KLInLoss`.
        log_ratios: Log-probabilities under the policy minus those under the reference, in nats.
    """
    if estimator == "k1":
        return log_ratios
    return jnp.square(log_ratios) / 2 if estimator == "k2" else jnp.expm1(-log_ratios) + log_ratios


# Ratios


def token_ratio(tokens: Tokens) -> jax.Array:
    """Log-ratio of each token, `[B, N]`."""
    return tokens.logps - tokens.old_logps


def sequence_mean_ratio(tokens: Tokens) -> jax.Array:
    """Mean log-ratio of the tokens of each completion, `[B, 1]` (GSPO)."""
    return sequence_ratio(tokens) / lengths(tokens.mask)


def sequence_ratio(tokens: Tokens) -> jax.Array:
    """Log-ratio of each whole completion, `[B, 1]`."""
    return jnp.sum(jnp.where(tokens.mask > 0, token_ratio(tokens), 0.0), axis=1, keepdims=True)


# Surrogates


def clipped(epsilon: float, epsilon_high: float | None = None, delta: float | None = None) -> SurrogateFn:
    """PPO's clip with two sides, and an upper bound `delta` of ratios that are not clipped."""
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)

    def surrogate(log_ratios: jax.Array, tokens: Tokens) -> Surrogate:
        # A completion's ratio goes with its advantage, which all its tokens have.
        ratio, advantages = jnp.exp(log_ratios), tokens.advantages[:, : log_ratios.shape[1]]
        bounded = ratio if delta is None else jnp.minimum(ratio, delta)
        loss = -jnp.minimum(bounded * advantages, jnp.clip(ratio, low, high) * advantages)
        is_low, is_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
        return Surrogate(loss, _clip_ratios(is_low, is_high))

    return surrogate


def truncated(max_ratio: float) -> SurrogateFn:
    """The log-likelihood, weighted by the ratio up to `max_ratio` (CISPO)."""

    def surrogate(log_ratios: jax.Array, tokens: Tokens) -> Surrogate:
        ratio = jax.lax.stop_gradient(jnp.exp(log_ratios))
        loss = -jnp.minimum(ratio, max_ratio) * tokens.advantages * tokens.logps
        return Surrogate(loss, {"cispo_clip_ratio": (ratio > max_ratio) & (tokens.advantages > 0)})

    return surrogate


def soft_gate(temperature_positive: float, temperature_negative: float) -> SurrogateFn:
    """A sigmoid of the ratio, with slope 1 at a ratio of 1 (SAPO)."""

    def surrogate(log_ratios: jax.Array, tokens: Tokens) -> Surrogate:
        temperature = jnp.where(tokens.advantages > 0, temperature_positive, temperature_negative)
        gate = jax.nn.sigmoid(temperature * jnp.expm1(log_ratios)) * 4 / temperature
        return Surrogate(-gate * tokens.advantages, {})

    return surrogate


def trust_region(max_divergence: float, max_ratio: float) -> SurrogateFn:
    """The ratio, up to `max_ratio`; no loss of tokens whose probability has moved too far (DPPO)."""

    def surrogate(log_ratios: jax.Array, tokens: Tokens) -> Surrogate:
        moved = jax.lax.stop_gradient(jnp.exp(tokens.logps) - jnp.exp(tokens.old_logps))
        is_low = (moved < -max_divergence) & (tokens.advantages < 0)
        is_high = (moved > max_divergence) & (tokens.advantages > 0)
        loss = -jnp.minimum(jnp.exp(log_ratios), max_ratio) * tokens.advantages
        return Surrogate(jnp.where(is_low | is_high, 0.0, loss), _clip_ratios(is_low, is_high))

    return surrogate


def geometric_mean(epsilon: float) -> SurrogateFn:
    """The geometric mean of a completion's ratios, each bounded in the direction of its advantage (GMPO)."""

    def surrogate(log_ratios: jax.Array, tokens: Tokens) -> Surrogate:
        sign = jnp.sign(tokens.advantages)
        bounded = sign * jnp.minimum(sign * log_ratios, epsilon)
        is_low, is_high = (log_ratios < -epsilon) & (sign < 0), (log_ratios > epsilon) & (sign > 0)
        mean = sequence_mean_ratio(tokens._replace(logps=bounded, old_logps=jnp.zeros_like(bounded)))
        return Surrogate(-jnp.exp(mean) * tokens.advantages, _clip_ratios(is_low, is_high))

    return surrogate


def gamma_weight(k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float) -> SurrogateFn:
    """The log-likelihood, weighted by `w^k exp(lambda (1 - w))` of a completion's ratio `w` (VESPO)."""

    def surrogate(log_ratios: jax.Array, tokens: Tokens) -> Surrogate:
        log_w = sequence_ratio(tokens)
        if tokens.correction is not None:
            log_w = log_w + jnp.sum(jnp.log(jnp.maximum(tokens.correction, LEAST_RATIO)), axis=1, keepdims=True)
        log_w = jnp.clip(jax.lax.stop_gradient(log_w), math.log(LEAST_RATIO), 20.0)
        is_positive = tokens.advantages[:, :1] >= 0  # all tokens of a completion have its advantage
        k = jnp.where(is_positive, k_positive, k_negative)
        slope = jnp.where(is_positive, lambda_positive, lambda_negative)
        weight = jnp.exp(k * log_w - slope * jnp.expm1(log_w))
        return Surrogate(-weight * tokens.advantages * tokens.logps, {"vespo/phi_seq_mean": weight})

    return surrogate


def _clip_ratios(is_low: jax.Array, is_high: jax.Array) -> dict[str, jax.Array]:
    """Metrics of what is clipped below, above, and in all, under TRL's names."""
    sides = {"low": is_low, "high": is_high, "region": is_low | is_high}
    return {f"clip_ratio/{name}_mean": side for name, side in sides.items()}


# Aggregations


def aggregated(
    mean_over: MeanOver, loss: jax.Array, mask: jax.Array, policy: RolloutOutputs, weight: jax.Array
) -> WeightedMean:
    """The loss of a micro-batch from that of its tokens `[B, N]`, their mask, and the weights of rows `[B]`."""
    if mean_over == "completions":
        loss = jnp.sum(loss, axis=1) / lengths(mask)[:, 0]
    return WeightedMean(jnp.sum(loss), divisor(mean_over, mask, policy.max_completion_length, weight))


def divisor(mean_over: MeanOver, mask: jax.Array, max_completion_length: jax.Array, weight: jax.Array) -> jax.Array:
    """The number of completions or tokens that a loss is a mean over, as `PolicyGradient.mean_over` has it.

    Args:
        mean_over: What is counted.
        mask: The weight of the completion where a token counts, else 0.
        max_completion_length: The most tokens that each completion could have had.
        weight: Of each completion.
    """
    if mean_over == "tokens":
        return jnp.sum(mask)
    return jnp.sum(max_completion_length * weight if mean_over == "max_length" else weight)


@build.register
def _(objective: config.GRPO) -> Loss:
    surrogate = clipped(objective.epsilon, objective.epsilon_high, objective.delta)
    return policy_gradient(objective, token_ratio, surrogate)


@build.register
def _(objective: config.DAPO) -> Loss:
    surrogate = clipped(objective.epsilon, objective.epsilon_high, objective.delta)
    return policy_gradient(objective, token_ratio, surrogate)


@build.register
def _(objective: config.DrGRPO) -> Loss:
    surrogate = clipped(objective.epsilon, objective.epsilon_high, objective.delta)
    return policy_gradient(objective, token_ratio, surrogate)


@build.register
def _(objective: config.GSPO) -> Loss:
    surrogate = clipped(objective.epsilon, objective.epsilon_high)
    return policy_gradient(objective, sequence_mean_ratio, surrogate)


@build.register
def _(objective: config.CISPO) -> Loss:
    return policy_gradient(objective, token_ratio, truncated(objective.max_ratio))


@build.register
def _(objective: config.SAPO) -> Loss:
    surrogate = soft_gate(objective.temperature_positive, objective.temperature_negative)
    return policy_gradient(objective, token_ratio, surrogate)


@build.register
def _(objective: config.GMPO) -> Loss:
    return policy_gradient(objective, token_ratio, geometric_mean(objective.epsilon))


@build.register
def _(objective: config.LUSPO) -> Loss:
    return policy_gradient(objective, sequence_mean_ratio, clipped(objective.epsilon, objective.epsilon_high))


@build.register
def _(objective: config.VESPO) -> Loss:
    surrogate = gamma_weight(
        objective.k_positive, objective.lambda_positive, objective.k_negative, objective.lambda_negative
    )
    return policy_gradient(objective, token_ratio, surrogate, reads_correction=True)


@build.register
def _(objective: config.DPPO) -> Loss:
    surrogate = trust_region(objective.max_divergence, objective.max_ratio)
    return policy_gradient(objective, token_ratio, surrogate)


@build.register
def _(objective: config.RLOO) -> Loss:
    surrogate = clipped(objective.epsilon, objective.epsilon_high)
    return policy_gradient(objective, sequence_ratio, surrogate)


@build.register
def _(objective: config.ReinforcePlusPlus) -> Loss:
    surrogate = clipped(objective.epsilon, objective.epsilon_high)
    return policy_gradient(objective, token_ratio, surrogate)
