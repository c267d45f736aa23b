"""How far the sampler of completions is from the policy that learns from them, and weights against it."""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxdsl.config.objectives.importance_sampling import ImportanceSampling
from nnxdsl.config.objectives.policy_gradient import PolicyGradient

_DIFFERENCE = "sampling/sampling_logp_difference/"
_RATIO = "sampling/importance_sampling_ratio/"
"""TRL's names of metrics."""

TokenLogps = Float[Array, "B N"]


class SamplerWeights(NamedTuple):
    """Weights against what the sampler computes otherwise than the policy; none has a gradient.

    Attributes:
        correction: Importance weights, `[B, N]` or `[B, 1]`; None for no correction.
        row_mask: 0 for completions that the off-policy mask leaves out, else 1, `[B, 1]`; None without one.
        metrics: Values of which means are reported, by name.
        maxima: Values of which maxima are reported; None without log-probabilities of a sampler.
    """

    correction: Array | None
    row_mask: Array | None
    metrics: dict[str, Array]
    maxima: dict[str, Array] | None


def sampler_weights(
    objective: PolicyGradient,
    sampler_logps: TokenLogps | None,
    logps: TokenLogps,
    old_logps: TokenLogps,
    advantages: TokenLogps,
    mask: TokenLogps,
) -> SamplerWeights:
    """Weights against the difference of a sampler, and how large it is.

    Args:
        objective: What is corrected.
        sampler_logps: Log-probabilities of the tokens under the sampler; None if it gave none.
        logps: Under the policy.
        old_logps: Under the policy before the update, without gradient.
        advantages: Of the tokens.
        mask: Positive where a token counts.

    Raises:
        ValueError: The objective reads log-probabilities of the sampler, and there are none.
    """
    correction, threshold = objective.importance_sampling, objective.off_policy_mask_threshold
    if sampler_logps is None:
        if correction is not None or threshold is not None:
            name = "off_policy_mask_threshold" if correction is None else "importance_sampling"
            raise ValueError(f"{name} needs the log-probabilities of the sampler in the batch")
        return SamplerWeights(None, None, {}, None)
    log_ratios = jnp.where(mask > 0, old_logps - sampler_logps, 0.0)
    maxima = {_DIFFERENCE + "max": jnp.max(jnp.abs(log_ratios), where=mask > 0, initial=-jnp.inf)}
    weights, row_mask, metrics = None, None, {_DIFFERENCE + "mean": jnp.abs(log_ratios)}
    if correction is not None:
        weights, more = importance_weights(correction, log_ratios, mask)
        metrics |= more
    if threshold is not None:
        row_mask = off_policy_mask(threshold, sampler_logps, jax.lax.stop_gradient(logps), advantages, mask)
        metrics["sampling/off_policy_mask_ratio"] = 1 - row_mask
    return SamplerWeights(weights, row_mask, metrics, maxima)


def importance_weights(
    settings: ImportanceSampling, log_ratios: Float[Array, "B N"], mask: Float[Array, "B N"]
) -> tuple[Array, dict[str, Array]]:
    """What corrects the loss of each token, `[B, N]` or `[B, 1]`, and metrics of it; see `ImportanceSampling`.

    Args:
        settings: Level and bounds.
        log_ratios: Log-probabilities under the policy minus those of the sampler, 0 where the mask is.
        mask: Positive where a token counts.
    """
    if settings.level != "token":
        log_ratios = jnp.sum(log_ratios, axis=1, keepdims=True)
        if settings.level == "sequence_mean":
            log_ratios = log_ratios / lengths(mask)
    raw = jnp.exp(log_ratios)
    low = 0.0 if settings.min_ratio is None else settings.min_ratio
    bounded = jnp.clip(raw, low, settings.max_ratio)
    weights = bounded if settings.mode == "truncate" else jnp.where(bounded == raw, raw, 0.0)
    return weights, {_RATIO + "mean": weights, _RATIO + "raw_mean": raw, _RATIO + "clip_mean": bounded != raw}


def off_policy_mask(
    threshold: float, sampler_logps: TokenLogps, logps: TokenLogps, advantages: TokenLogps, mask: TokenLogps
) -> Float[Array, "B 1"]:
    """0 for completions with a negative advantage that the policy has moved too far from, else 1.

    Args:
        threshold: Most nats by which a token's log-probability may have fallen, in the mean over the completion
            (DeepSeek-V3.2, arXiv:2512.02556, equation 9).
        sampler_logps: Log-probabilities when they were sampled.
        logps: Under the policy.
        advantages: Of the tokens, of which a completion's first counts.
        mask: Positive where a token counts.
    """
    fallen = jnp.sum(jnp.where(mask > 0, sampler_logps - logps, 0.0), axis=1, keepdims=True) / lengths(mask)
    first = jnp.argmax(mask > 0, axis=1, keepdims=True)
    return ((jnp.take_along_axis(advantages, first, axis=1) >= 0) | (fallen <= threshold)).astype(jnp.float32)


def lengths(mask: TokenLogps) -> Float[Array, "B 1"]:
    """Tokens of each completion that count, at least 1."""
    return jnp.maximum(jnp.sum(mask > 0, axis=1, keepdims=True), 1)
