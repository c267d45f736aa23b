"""An objective of somebody else's: all that a third party writes, language and loss."""

from __future__ import annotations

from typing import ClassVar

import attrs
import jax

from nnxdsl import Objective, losses


@attrs.frozen(kw_only=True)
class SimPO(Objective):
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734, equation 6); it has no reference.

    Attributes:
        beta: Scale of the length-normalised rewards.
        gamma: Margin between them.
    """

    batch_kind: ClassVar[str] = "pairs"

    beta: float = 2.0
    gamma: float = 1.0


@losses.build.register(SimPO)
def _(objective: SimPO) -> losses.Loss:
    def loss(policy: losses.PairLogps, reference: None, weight: jax.Array) -> losses.LossTerms:
        chosen = objective.beta * policy.chosen_logps / policy.chosen_tokens
        rejected = objective.beta * policy.rejected_logps / policy.rejected_tokens
        margin = chosen - rejected
        metrics = {"rewards/margins": margin}
        return losses.per_row(-jax.nn.log_sigmoid(margin - objective.gamma), metrics, weight)

    return loss
