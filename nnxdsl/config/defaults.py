"""Default values that an experiment derives from other fields, with their sources."""

from __future__ import annotations

import functools

from nnxdsl.config.adapter import Adapter
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.preference import ChosenSFT
from nnxdsl.config.optimizer import AdamW, Optimizer
from nnxdsl.config.schedule import WarmupCosine

EPOCHS = 1.0
"""Passes over the data; TRL's default of 3 is that of `transformers`, its examples and "LoRA Without Regret" take 1."""

PEAK_LR = {
    "sequences": (2e-5, 2e-4),
    "rewards": (1e-5, 1e-4),
    "pairs": (1e-6, 1e-5),
    "feedback": (1e-6, 1e-5),
    "prompts": (1e-6, 1e-5),
}
"""Peak learning rates by what the objective reads: of all weights, and of an adapter.

Those of all weights are the defaults of TRL 1.16: 2e-5 of SFTConfig (and GKDConfig); 1e-6 of DPOConfig, ORPOConfig,
CPOConfig (SimPO), KTOConfig and GRPOConfig; for reward models that of its script reward_modeling.py. Those of adapters
are ten times as large: "LoRA Without Regret" (Schulman et al. 2025, https://thinkingmachines.ai/blog/lora) finds that
factor for supervised and reinforcement learning alike, nearly independent of the rank.
"""


def default_optimizer(objective: Objective, adapter: Adapter | None) -> Optimizer | None:
    """AdamW with a peak learning rate by objective and adapter; None for an objective that reads other batches.

    AdamW's own settings, no weight decay and gradients clipped at a norm of 1 are TRL's defaults; a tenth of the steps
    as warm-up and a cosine are those of the published recipes (https://github.com/huggingface/alignment-handbook).
    """
    kind = objective.batch_kind
    if isinstance(objective, ChosenSFT):
        kind = "sequences"
    elif not objective.reads_logps:
        kind = "rewards"
    return None if kind not in PEAK_LR else _adamw(PEAK_LR[kind][adapter is not None])


@functools.cache
def _adamw(peak_lr: float) -> Optimizer:
    return AdamW(schedule=WarmupCosine(peak_lr=peak_lr))
