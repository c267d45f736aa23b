"""What a run optimizes: one class per algorithm, its divergence, its reference model and its rewards.

Importing the package defines every member of `Objective`.
"""

from nnxdsl.config.objectives import distillation, grpo, kto, preference
from nnxdsl.config.objectives.base import SFT, Objective

__all__ = ["SFT", "Objective", "distillation", "grpo", "kto", "preference"]
