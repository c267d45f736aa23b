"""The loss of reward models."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nnxdsl.config.objectives.reward_model import Reward
from nnxdsl.losses.base import Loss, LossTerms, build
from nnxdsl.losses.preference import with_reward_metrics


class PairRewards(NamedTuple):
    """Rewards of the completions of pairs, and the margins between them, None for 0; float32 `[B]`."""

    chosen: jax.Array
    rejected: jax.Array
    margin: jax.Array | None = None


@build.register
def _(objective: Reward) -> Loss:
    def loss(policy: PairRewards, reference: None, weight: jax.Array) -> LossTerms:
        chosen, rejected = (jnp.where(weight > 0, side, 0.0) for side in policy[:2])
        difference = chosen - rejected if policy.margin is None else chosen - rejected - policy.margin
        losses = -jax.nn.log_sigmoid(difference)
        losses = losses + objective.center_rewards_coefficient * jnp.square(chosen + rejected)
        return with_reward_metrics(losses, chosen, rejected, weight)

    return loss
