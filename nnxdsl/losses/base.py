"""The interface of losses, and the loss of sequences (SFT).

A loss is a function of log-probabilities and masks; it knows no model, adapter or device. Losses of pairs are in
`preference.py`. To add one, write a frozen subclass of `Objective` and a function registered with
`@losses.build.register(MyObjective)`.
"""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.sft import SFT
from nnxdsl.errors import NotRegisteredError
from nnxdsl.losses.lm_head.token_stats import TokenStats


class WeightedMean(NamedTuple):
    """A sum and its divisor: both are summed over micro-batches and devices, and divided once."""

    total: jax.Array
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride] - not `tuple.count`


class LossTerms(NamedTuple):
    """The loss and metrics of one micro-batch as sums, to be added over micro-batches and devices.

    Attributes:
        loss: The loss; its `count` also divides the gradient.
        metrics: Further means, by their public names.
        max_logits: The largest attention scores (see `DecoderOutput`), of which the maximum is taken where sums are
            added; None where they are not recorded.
        maxima: Metrics that are maxima over all rows, scalars by their public names; None where there are none.
    """

    loss: WeightedMean
    metrics: Mapping[str, WeightedMean]
    max_logits: dict[str, Array] | None = None
    maxima: Mapping[str, Array] | None = None

    def added_to(self, other: LossTerms) -> LossTerms:
        """The terms of both micro-batches together."""
        one, two = (terms._replace(max_logits=None, maxima=None) for terms in (self, other))
        largest = jax.tree.map(jnp.maximum, (self.max_logits, self.maxima), (other.max_logits, other.maxima))
        summed = jax.tree.map(lambda x, y: x + y.astype(x.dtype), one, two)
        return summed._replace(max_logits=largest[0], maxima=largest[1])

    def zeros(self) -> LossTerms:
        """Terms of no rows, in the form of these; they may be abstract."""
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self)
        none = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), (self.max_logits, self.maxima))
        return sums._replace(max_logits=none[0], maxima=none[1])


class PairLogps(NamedTuple):
    """Log-probabilities of a micro-batch of pairs; all float32 `[B]`.

    Attributes:
        chosen_logps: Summed over the tokens of the chosen completion.
        rejected_logps: Summed over the tokens of the rejected completion.
        chosen_tokens: Number of tokens of the chosen completion.
        rejected_tokens: Number of tokens of the rejected completion.
        desirable: 1 where a completion of KTO is desirable, else 0; None for pairs.
        likelihood: WPO's weight of the pair; carries no gradient. None where no loss reads it.
    """

    chosen_logps: Array
    rejected_logps: Array
    chosen_tokens: Array
    rejected_tokens: Array
    desirable: Array | None = None
    likelihood: Array | None = None


Loss = Callable[[Any, Any, jax.Array], LossTerms]
"""`loss(policy, reference, weight)`: the terms of a micro-batch from the loss inputs of policy and reference (None
without one) and the weight of each row `[B]`. Loss inputs are `PairLogps` for pairs and `TokenStats` for sequences."""


@singledispatch
def build(objective: Objective) -> Loss:
    """Build the loss of an objective; register an `Objective` of your own here."""
    name = type(objective).__name__
    raise NotRegisteredError(
        f"no loss is registered for {type(objective).__qualname__}; write\n"
        f"  from nnxdsl import losses\n"
        f"  @losses.build.register({name})\n"
        f"  def _(objective): return lambda policy, reference, weight: losses.LossTerms(...)"
    )


@build.register
def _(objective: SFT) -> Loss:
    def loss(policy: TokenStats, reference: TokenStats | None, weight: jax.Array) -> LossTerms:
        counted = policy.mask * weight[:, None]  # [B, N]
        per_token = objective.z_loss * jnp.square(policy.log_z) - policy.logp
        return LossTerms(WeightedMean(jnp.sum(per_token * counted), jnp.sum(counted)), {})

    return loss


def per_row(
    loss: Float[Array, " B"], metrics: Mapping[str, Float[Array, " B"]], weight: Float[Array, " B"]
) -> LossTerms:
    """Terms of a loss, and of metrics, that are means over rows."""
    return LossTerms(row_mean(loss, weight), {name: row_mean(value, weight) for name, value in metrics.items()})


def derived_metrics(means: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a whole batch; adds `rewards/margins` where chosen and rejected rewards are means over other rows."""
    chosen, rejected = means.get("rewards/chosen"), means.get("rewards/rejected")
    if chosen is None or rejected is None or "rewards/margins" in means:
        return dict(means)
    return {**means, "rewards/margins": chosen - rejected}


def means(batches: Iterable[Mapping[str, WeightedMean]]) -> dict[str, float]:
    """The mean of each metric over batches on the host: its sums divided once, and none of nothing."""
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for ratios in batches:
        for name, ratio in ratios.items():
            totals[name][0] += float(ratio.total)
            totals[name][1] += float(ratio.count)
    return derived_metrics({name: total / count for name, (total, count) in totals.items() if count})


def row_mean(value: Float[Array, " B"], weight: Float[Array, " B"]) -> WeightedMean:
    """A mean over rows as sum and count; rows of weight 0 may hold anything, NaN too."""
    return WeightedMean(jnp.sum(jnp.where(weight > 0, value, 0.0) * weight), jnp.sum(weight))
