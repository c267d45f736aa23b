"""Objectives: one class per algorithm, and its divergence, reference model and rewards.

Importing the package defines every member of `Objective`.
"""

from nnxdsl.config.objectives import (
    distillation,
    kto,
    on_policy_distillation,
    policy_gradient,
    preference,
    reward_library,
    reward_model,
    sft,
)
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.sft import SFT

__all__ = [
    "SFT",
    "Objective",
    "distillation",
    "kto",
    "on_policy_distillation",
    "policy_gradient",
    "preference",
    "reward_library",
    "reward_model",
    "sft",
]
