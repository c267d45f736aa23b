"""Advantages of completions from their rewards, on the host; settings are described with `PolicyGradient`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nnxdsl.config.objectives.policy_gradient import Baseline, PolicyGradient, Scale

EPSILON = 1e-4
"""Added to standard deviations that advantages are divided by, as TRL does."""

Float64 = npt.NDArray[np.float64]


def token_advantages(
    objective: PolicyGradient, rewards: Float64, mask: npt.NDArray[np.bool_], log_ratios: Float64 | None = None
) -> Float64:
    """The advantage of each token.

    Args:
        objective: Baseline, scale, whitening, and weight of the KL divergence in the reward.
        rewards: Of completions, groups one after another, `[B]`; NaN for those that have none.
        mask: Which tokens are theirs, `[B, N]`.
        log_ratios: Log-probabilities of the tokens under the policy minus those under the reference `[B, N]`, of which
            rewards lose `beta` times; None: the KL divergence is not in the reward.

    Returns:
        `[B, N]`, 0 where the mask is off.
    """
    kl = np.zeros(mask.shape) if log_ratios is None else objective.beta * np.where(mask, log_ratios, 0.0)
    group, baseline, scale = objective.num_generations, objective.baseline, objective.scale_rewards
    if objective.whitens_tokens:
        centered = completion_advantages(rewards.reshape(-1, group), baseline, scale).reshape(-1, 1)
        returns = centered - np.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
        return whitened(returns, mask & ~np.isnan(rewards)[:, None])
    totals = (rewards - kl.sum(axis=1)).reshape(-1, group)
    return np.where(mask, completion_advantages(totals, baseline, scale).reshape(-1, 1), 0.0)


def completion_advantages(rewards: Float64, baseline: Baseline = "mean", scale: Scale = "none") -> Float64:
    """By how much the reward of each completion exceeds the baseline.

    Args:
        rewards: `[prompts, completions]`; NaN for completions that have none, which take part in no mean and get 0.
        baseline: "mean" of the group, "leave_one_out": the mean of the others in the group, or "none".
        scale: What differences are divided by: the standard deviation of rewards in the "group" or in the "batch"
            (of samples, n - 1), or nothing ("none").

    Returns:
        As `rewards`.
    """
    scored = np.ma.masked_invalid(rewards)
    centered = scored if baseline == "none" else scored - scored.mean(axis=1, keepdims=True)
    if baseline == "leave_one_out":
        count = scored.count(axis=1, keepdims=True)
        centered = centered * (count / np.maximum(count - 1, 1))
    if scale == "none":
        return centered.filled(0.0)
    std = scored.std(axis=1, ddof=1, keepdims=True) if scale == "group" else scored.std(ddof=1)
    return (centered / (std + EPSILON)).filled(0.0)


def whitened(values: Float64, mask: npt.NDArray[np.bool_]) -> Float64:
    """Values `[B, N]` with mean 0 and standard deviation 1 where the mask is on; 0 elsewhere."""
    counted = values[mask]
    std = counted.std(ddof=1) if counted.size > 1 else 0.0
    return np.where(mask, (values - counted.mean()) / (std + EPSILON), 0.0)
