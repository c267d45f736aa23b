"""Metrics of completions and their rewards, under TRL's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nnxdsl.data.rewards import Rewards
from nnxdsl.errors import RunError
from nnxdsl.rollouts.dynamic_sampling import has_spread
from nnxdsl.rollouts.episode import Episode
from nnxdsl.storage.records import METRICS


def episode_metrics(
    episodes: Sequence[Episode], rewards: Rewards, logged: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Rewards and lengths of completions, and what reward functions gave `log_metric`, by name; no mean over nothing.

    Raises:
        RunError: A function logs a metric under a name that the run has itself.
    """
    values = np.array([one.rewards for one in episodes], np.float64)
    lengths = np.array([sum(one.is_sampled) for one in episodes])
    is_truncated = np.array([one.is_truncated for one in episodes])
    metrics = {
        **_mean_and_std(rewards.totals(values), "reward", "reward_std"),
        "completions/clipped_ratio": float(is_truncated.mean()),
        **_lengths(lengths, "length"),
        **_lengths(lengths[~is_truncated], "terminated_length"),
    }
    if turns := [sum(message["role"] == "assistant" for message in one.turns) for one in episodes if one.turns]:
        metrics["environment/mean_turns"] = float(np.mean(turns))
    if calls := [one.calls for one in episodes if one.calls is not None]:
        metrics["tools/call_frequency"] = float(np.mean(calls))
        metrics |= {"tools/failure_frequency": sum(one.failures for one in episodes) / sum(calls)} if any(calls) else {}
    for index, name in enumerate(rewards.names):
        metrics |= _mean_and_std(values[:, index], f"rewards/{name}/mean", f"rewards/{name}/std")
    if taken := logged.keys() & {*metrics, *METRICS, "frac_reward_zero_std"}:
        raise RunError(f"log_metric: '{min(taken)}' is a metric of the run itself; give yours another name")
    return metrics | {name: float(np.mean(each)) for name, each in logged.items()}


def group_metrics(episodes: Sequence[Episode], rewards: Rewards, size: int) -> dict[str, float]:
    """The share of groups of `size` completions, one after another, that all have one reward."""
    spread = has_spread(rewards.totals([one.rewards for one in episodes]), size)
    return {"frac_reward_zero_std": float(1 - spread.mean())}


def _mean_and_std(values: np.ndarray, mean: str, std: str) -> dict[str, float]:
    """Two metrics of the values that are there; none if there are none."""
    scored = values[~np.isnan(values)]
    if not scored.size:
        return {}
    return {mean: float(scored.mean()), std: float(scored.std(ddof=1)) if scored.size > 1 else 0.0}


def _lengths(lengths: np.ndarray, name: str) -> dict[str, float]:
    """Metrics of the lengths of completions; none if there are none, where TRL has 0."""
    if not lengths.size:
        return {}
    each = {"mean": lengths.mean(), "min": lengths.min(), "max": lengths.max()}
    return {f"completions/{which}_{name}": float(value) for which, value in each.items()}
