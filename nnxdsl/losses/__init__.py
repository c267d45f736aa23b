"""Losses from log-probabilities and masks, one file per family of objectives; they know no model.

Importing the package registers the losses of all built-in objectives; `losses.build.register` adds others.
"""

from nnxdsl.losses import distillation, kto, policy_gradient, preference, reward_model
from nnxdsl.losses.base import Loss, LossTerms, PairLogps, WeightedMean, build, derived_metrics, per_row, row_mean

__all__ = [
    "Loss",
    "LossTerms",
    "PairLogps",
    "WeightedMean",
    "build",
    "derived_metrics",
    "distillation",
    "kto",
    "per_row",
    "policy_gradient",
    "preference",
    "reward_model",
    "row_mean",
]
