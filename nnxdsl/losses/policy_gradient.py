"""The loss of a policy's own answers, from log-probabilities and advantages; what each setting means is with GRPO.

Advantages are computed here as well, on the host, from rewards alone.
"""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float

from nnxdsl.config.objectives.policy_gradient import GRPO
from nnxdsl.losses.base import Loss, LossTerms, WeightedMean, build
from nnxdsl.losses.lm_head.token_stats import TokenStats

SLACK = 1e-4
"""Added to standard deviations that advantages are divided by, as TRL does."""

Float64 = npt.NDArray[np.float64]


class RolloutOutputs(NamedTuple):
    """One model's log-probabilities of completions that a policy has generated.

    Attributes:
        stats: Of each of their tokens, `[B, N]`.
        advantage: `[B]`.
        max_completion_length: The most tokens that an answer could have had, `[B]`.
        old_logps: Log-probabilities of the tokens when they were drawn, `[B, N]`; None: those of the policy as it is.
    """

    stats: TokenStats
    advantage: Array
    max_completion_length: Array
    old_logps: Array | None


@build.register
def _(objective: GRPO) -> Loss:
    above = objective.epsilon if objective.epsilon_high is None else objective.epsilon_high
    low, high = 1 - objective.epsilon, 1 + above

    def loss(policy: RolloutOutputs, reference: RolloutOutputs | None, weight: jax.Array) -> LossTerms:
        logp, mask = policy.stats.logp, policy.stats.mask * weight[:, None]  # [B, N]
        count = jnp.sum(mask)
        old = jax.lax.stop_gradient(logp) if policy.old_logps is None else policy.old_logps
        ratio = jnp.exp(logp - old)
        gain = policy.advantage[:, None]
        per_token = -jnp.minimum(ratio * gain, jnp.clip(ratio, low, high) * gain)
        metrics: dict[str, WeightedMean] = {}
        if reference is not None:
            estimate = kl(objective.kl_estimator, logp - reference.stats.logp)
            per_token = per_token + objective.beta * estimate
            metrics["kl"] = WeightedMean(jnp.sum(estimate * mask), count)
        if policy.old_logps is not None:
            below, above = (ratio < low) & (gain < 0), (ratio > high) & (gain > 0)
            sides = {"low": below, "high": above, "region": below | above}
            metrics |= {
                f"clip_ratio/{name}_mean": WeightedMean(jnp.sum(is_in * mask), count) for name, is_in in sides.items()
            }
        return LossTerms(
            _mean_over(objective.loss_type, per_token, mask, weight, policy.max_completion_length), metrics
        )

    return loss


def kl(estimate: Literal["k1", "k2", "k3"], ratio: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """An estimate of the KL divergence of the policy from the reference, of tokens that the policy has drawn.

    Args:
        estimate: Which; see `GRPO`.
        ratio: Log-probability under the policy less that under the reference, in nats.
    """
    if estimate == "k1":
        return ratio
    return jnp.square(ratio) / 2 if estimate == "k2" else jnp.expm1(-ratio) + ratio


def _mean_over(
    loss_type: Literal["grpo", "dapo", "dr_grpo"],
    per_token: jax.Array,
    mask: jax.Array,
    weight: jax.Array,
    limit: jax.Array,
) -> WeightedMean:
    """The loss of tokens `[B, N]` as a sum and what it is divided by."""
    sums = jnp.sum(per_token * mask, axis=1)  # [B]
    if loss_type == "dapo":
        return WeightedMean(jnp.sum(sums), jnp.sum(mask))
    if loss_type == "dr_grpo":
        return WeightedMean(jnp.sum(sums), jnp.sum(limit * weight))
    return WeightedMean(jnp.sum(sums / jnp.maximum(jnp.sum(mask, axis=1), 1)), jnp.sum(weight))


def advantages(rewards: Float64, scale: Literal["group", "batch", "none"]) -> Float64:
    """By how much each answer is better than the others to its prompt.

    Args:
        rewards: [prompts, answers to each] their weighted sums; NaN for answers that have none, which take part in no
            mean and get 0.
        scale: What they are divided by; see `GRPO.scale_rewards`. Standard deviations are those of samples (n - 1).

    Returns:
        As `rewards`.
    """
    scored = np.ma.masked_invalid(rewards)
    better = scored - scored.mean(axis=1, keepdims=True)
    if scale == "none":
        return better.filled(0.0)
    spread = scored.std(axis=1, ddof=1, keepdims=True) if scale == "group" else scored.std(ddof=1)
    return (better / (spread + SLACK)).filled(0.0)
