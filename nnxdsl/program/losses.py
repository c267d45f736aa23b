"""What is minimised, from log-probabilities and masks alone: a loss knows no model, no adapter and no device.

A third party adds one in a file of its own: a frozen subclass of `Objective`, and a function registered with
`@losses.build.register(MyObjective)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxdsl.program.logprobs import TokenStats
from nnxdsl.spec.objective import DPO, SFT, Objective


class Ratio(NamedTuple):
    """A sum and what it is to be divided by, kept apart until everything has been added up."""

    total: jax.Array
    count: jax.Array


class Terms(NamedTuple):
    """What a loss says of one micro-batch: sums, which add over micro-batches and devices.

    Attributes:
        loss: Its `count` is the weight that the gradient is divided by as well.
        metrics: Further means, by their public names.
    """

    loss: Ratio
    metrics: Mapping[str, Ratio]


class Pairs(NamedTuple):
    """Log-probabilities of a micro-batch of pairs; all float32 `[B]`.

    Attributes:
        chosen: Summed over the completion's tokens.
        rejected: Likewise.
        chosen_tokens: How many tokens that sum has.
        rejected_tokens: Likewise.
    """

    chosen: Array
    rejected: Array
    chosen_tokens: Array
    rejected_tokens: Array


PairLoss = Callable[[Pairs, Pairs | None, Float[Array, "B"]], Terms]
SequenceLoss = Callable[[TokenStats, TokenStats | None, Float[Array, "B"]], Terms]


@singledispatch
def build(objective: Objective) -> Any:
    """The loss of an objective: a `PairLoss` or a `SequenceLoss`, by what the objective reads."""
    name = type(objective).__name__
    raise NotImplementedError(
        f"no loss is registered for {type(objective).__qualname__}; write\n"
        f"  from nnxdsl.program import losses\n"
        f"  @losses.build.register({name})\n"
        f"  def _(objective): return lambda policy, reference, weight: losses.Terms(...)"
    )


@build.register
def _(objective: SFT) -> SequenceLoss:
    def loss(policy: TokenStats, reference: TokenStats | None, weight: jax.Array) -> Terms:
        counted = policy.mask * weight[:, None]  # [B, N]
        return Terms(Ratio(-jnp.sum(policy.logp * counted), jnp.sum(counted)), {})

    return loss


@build.register
def _(objective: DPO) -> PairLoss:
    beta, smoothing = objective.beta, objective.label_smoothing

    def loss(policy: Pairs, reference: Pairs | None, weight: jax.Array) -> Terms:
        assert reference is not None
        chosen = beta * (policy.chosen - reference.chosen)  # [B], beta enters here and nowhere else
        rejected = beta * (policy.rejected - reference.rejected)
        margin = chosen - rejected
        per_pair = -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": margin,
            "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        }
        return per_row(per_pair, metrics, weight)

    return loss


def per_row(loss: jax.Array, metrics: Mapping[str, jax.Array], weight: jax.Array) -> Terms:
    """Terms of a loss that is a mean over rows; all arrays float32 `[B]`."""
    count = jnp.sum(weight)

    def ratio(x: jax.Array) -> Ratio:
        return Ratio(jnp.sum(jnp.where(weight > 0, x, 0.0) * weight), count)

    return Terms(ratio(loss), {name: ratio(value) for name, value in metrics.items()})
