"""Completions of a rollout as rows of `rollouts.jsonl`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnxdsl.config.objectives.policy_gradient import PolicyGradient
from nnxdsl.rollouts.episode import Episode
from nnxdsl.rollouts.rollout import Rollout
from nnxdsl.rollouts.rollouts import Rollouts


def group_rows(rollouts: Rollouts, rollout: Rollout, limit: int) -> list[dict[str, Any]]:
    """The first `limit` prompts with their completions in plain JSON values, without the step; see `RunRows`.

    Empty for a rollout that was read from a checkpoint: its rows were written before that.
    """
    episodes, size = rollout.episodes or (), rollouts.objective.num_generations
    has_advantages = isinstance(rollouts.objective, PolicyGradient)  # distillation has none
    rows = list[dict[str, Any]]()
    for group, first in enumerate(range(0, min(len(episodes), limit * size), size)):
        row = episodes[first].row
        prompt = rollouts.tokenizer.decode(rollouts.prompts.row(row)["prompt"].tolist(), skip_special=False)
        advantages = rollout.batch.advantages[first : first + size, 0]
        members = [
            _completion(rollouts, episode, float(advantage) if has_advantages else None)
            for episode, advantage in zip(episodes[first : first + size], advantages, strict=True)
        ]
        rows.append({"group": group, "row": rollouts.prompts.row_ids[row], "prompt": prompt, "completions": members})
    return rows


def unscored(rollouts: Rollouts, rollout: Rollout) -> list[str]:
    """The prompts of completions that no reward applies to, whose advantage is 0."""
    if not isinstance(rollouts.objective, PolicyGradient):  # rewards are logged alone
        return []
    episodes = rollout.episodes or ()
    return [rollouts.prompts.row_ids[one.row] for one in episodes if all(map(np.isnan, one.rewards))]


def _completion(rollouts: Rollouts, episode: Episode, advantage: float | None) -> dict[str, Any]:
    (total,) = rollouts.rewards.totals(episode.rewards)
    return {
        "text": episode.text,
        "reward": _or_none(total),
        "rewards": dict(zip(rollouts.rewards.names, map(_or_none, episode.rewards), strict=True)),
        "advantage": advantage,
        "length": sum(episode.is_sampled),
        "truncated": episode.is_truncated,
        **({"turns": [dict(message) for message in episode.turns]} if episode.turns else {}),
        **({"extra": dict(episode.extra)} if episode.extra else {}),
    }


def _or_none(value: float) -> float | None:
    """A number in JSON, where NaN is None."""
    return None if np.isnan(value) else float(value)
