"""The KTO loss of single completions labelled desirable or undesirable; its class documents the formula.

Completions come as `PairLogps`: `chosen_logps` is a completion's log-probability, whatever its label, and
`rejected_logps` that of a mismatched completion, of another prompt, which estimates the KL term.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnxdsl.config.objectives import kto as spec
from nnxdsl.losses.base import Loss, LossTerms, PairLogps, WeightedMean, build, row_mean
from nnxdsl.losses.preference import log_ratios, mask_padding_rows

Rows = Float[Array, " B"]


@build.register
def _(objective: spec.KTO) -> Loss:
    beta = objective.beta

    def loss(policy: PairLogps, reference: PairLogps | None, weight: jax.Array) -> LossTerms:
        assert reference is not None
        assert policy.desirable is not None
        pair = log_ratios(mask_padding_rows(policy, weight), mask_padding_rows(reference, weight))
        desirable = policy.desirable > 0
        mismatched = row_mean(jax.lax.stop_gradient(pair.rejected), weight)
        kl = jax.nn.relu(mismatched.total / jnp.maximum(mismatched.count, 1))
        signed = jnp.where(desirable, pair.chosen - kl, kl - pair.chosen)
        factor = jnp.where(desirable, objective.desirable_weight, objective.undesirable_weight)
        # 1 - sigmoid(z) is sigmoid(-z), which is exact where z is large.
        terms = row_mean(factor * jax.nn.sigmoid(-beta * signed), weight)
        metrics = {"kl": WeightedMean(kl * mismatched.count, mismatched.count)}
        for name, rows in (("chosen", desirable), ("rejected", ~desirable)):
            row_weight = weight * rows
            metrics[f"rewards/{name}"] = row_mean(beta * pair.chosen, row_weight)
            metrics[f"logps/{name}"] = row_mean(policy.chosen_logps, row_weight)
        return LossTerms(terms, metrics)

    return loss
