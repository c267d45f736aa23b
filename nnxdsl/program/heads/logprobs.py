"""Log-probabilities of target tokens, the head of most objectives, and the choice of a head by the objective."""

from __future__ import annotations

from functools import partial, singledispatch
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.policy_gradient import PolicyGradient
from nnxdsl.losses.base import WeightedMean
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.program.batches import BatchKind, LossInputs, PairOptions, Targets
from nnxdsl.program.heads.base import Head, HeadInputs, HeadOutput


@attrs.frozen
class LogProbs(Head):
    """Log-probabilities of target tokens.

    Attributes:
        temperature: The temperature of logits.
        ld_alpha: LD-DPO's weight of a pair's tokens beyond the length of the shorter completion.
        uses_wpo: Whether a loss reads WPO weights.
        uses_entropy: Whether a loss reads entropies.
    """

    temperature: float = 1.0  # pyright: ignore[reportIncompatibleVariableOverride] - a field in place of a default
    ld_alpha: float = 1.0
    uses_wpo: bool = False
    uses_entropy: bool = False

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`; the batch's kind groups the log-probabilities."""
        targets = inputs.targets()
        stats = inputs.token_stats(targets, self.temperature, has_entropy_gradient=self.uses_entropy)
        wpo_logps = partial(self._wpo_logps, inputs, targets, stats) if self.uses_wpo else None
        return HeadOutput(*inputs.kind.loss_inputs(stats, inputs.batch, PairOptions(self.ld_alpha, wpo_logps)))

    def metrics(self, kind: BatchKind[Any], inputs: LossInputs, weight: jax.Array) -> dict[str, WeightedMean]:
        """Metrics of log-probabilities that kinds of batch have."""
        return kind.logp_metrics(inputs, weight)

    def _wpo_logps(self, inputs: HeadInputs, targets: Targets, stats: TokenStats) -> jax.Array:
        """WPO's `log p - log(sum of p^2 over the vocabulary)` of each target, without gradient; zero where masked."""
        # log(sum of p^2) is the logsumexp of twice the logits, that is at half the temperature, minus 2 log_z.
        log_z = inputs.token_stats(targets, self.temperature / 2, has_gradient=False).log_z
        return jax.lax.stop_gradient(jnp.where(targets.mask, stats.logp + 2 * stats.log_z - log_z, 0.0))


@singledispatch
def build(objective: Objective) -> Head:
    """The head of an objective; register an `Objective` here that reads other things than log-probabilities."""
    return LogProbs(ld_alpha=objective.ld_alpha, uses_wpo="wpo" in (term.weighting for term in objective.all_terms))


@build.register
def _(objective: PolicyGradient) -> Head:
    return LogProbs(temperature=objective.temperature, uses_entropy=objective.has_entropy_bonus)
