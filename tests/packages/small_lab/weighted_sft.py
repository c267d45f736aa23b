"""An objective of somebody else's over a batch of somebody else's."""

from __future__ import annotations

from typing import ClassVar

import attrs
import jax
import jax.numpy as jnp

from nnxdsl import Objective, losses
from small_lab.scored_batch import ScoredTokens


@attrs.frozen(kw_only=True)
class WeightedSFT(Objective):
    """Reward-weighted regression (Peters and Schaal 2007): a text counts `exp(score / temperature)`.

    Attributes:
        temperature: Scale of the scores.
    """

    batch_kind: ClassVar[str] = "scored"

    temperature: float = 1.0


@losses.build.register(WeightedSFT)
def _(objective: WeightedSFT) -> losses.Loss:
    def loss(policy: ScoredTokens, reference: None, weight: jax.Array) -> losses.LossTerms:
        logp = jnp.sum(policy.stats.logp * policy.stats.mask, axis=1)  # [B]
        factor = jnp.exp(policy.score / objective.temperature)
        return losses.per_row(-factor * logp, {"score": policy.score}, weight)

    return loss
