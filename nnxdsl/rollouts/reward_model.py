"""Rewards of reward models, which see what the policy wrote as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnxdsl.config.objectives.reward_library import Model
from nnxdsl.data.rewards.functions import function_of, refused
from nnxdsl.errors import DataError, RunError, WeightsError
from nnxdsl.generate.pretrained import NOT_A_REWARD_MODEL, Prompt, load


@function_of.register
def _reward_model(reward: Model, max_completion_length: int | None) -> Callable[..., Any]:
    """Loads the model before the first step; only the first process calls rewards."""
    if jax.process_index() > 0:
        return lambda prompts, completions: []
    try:
        model = load(reward.path, dtype=reward.dtype)
        model.tokenizer  # noqa: B018 - raises where there is none
    except (DataError, RunError, WeightsError) as error:
        raise refused("path", str(error)) from error
    if model.config.num_labels != 1:
        raise refused("path", f"{reward.path}: {NOT_A_REWARD_MODEL}")

    def reward_model(prompts: Sequence[Prompt], completions: Sequence[Prompt]) -> list[float]:
        return model.rewards(prompts, completions, batch_size=reward.batch_size).tolist()

    return reward_model
