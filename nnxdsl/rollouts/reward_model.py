"""Rewards of reward models, which see what the policy wrote as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import jax

from nnxdsl.config.objectives.reward import Reward
from nnxdsl.config.objectives.reward_library import Model
from nnxdsl.config.weights import HF, Checkpoint, From
from nnxdsl.data.rewards.functions import function_of, refused
from nnxdsl.errors import DataError, RunError, WeightsError
from nnxdsl.generate.pretrained import NOT_A_REWARD_MODEL, Pretrained, Prompt, load


def in_home(reward: Reward, home: Path) -> Reward:
    """The reward; its model is the run of an earlier experiment where it is given by `Weights.From`."""
    if not isinstance(reward, Model) or not isinstance(reward.weights, From):
        return reward
    return attrs.evolve(reward, weights=Checkpoint(str(home / reward.weights.experiment.id)))


@attrs.define(eq=False)
class RewardModel:
    """The function of a reward model; only the first process calls rewards, and has the model.

    Attributes:
        reward: The reward, whose weights are at a path.
    """

    reward: Model
    _model: Pretrained | None = attrs.field(default=None, init=False)

    def open(self) -> None:
        """Loads the model; see `Opened`."""
        if self._model is None and jax.process_index() == 0:
            self._model = self._load()

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Prompt]) -> list[float]:
        """The rewards of completions."""
        self.open()
        assert self._model is not None
        return self._model.rewards(prompts, completions, batch_size=self.reward.batch_size).tolist()

    def _load(self) -> Pretrained:
        weights = self.reward.weights
        assert isinstance(weights, HF | Checkpoint)  # `in_home` has found the others
        try:
            model = load(weights.path, dtype=self.reward.dtype, allow_non_finite=weights.allow_non_finite)
            _ = model.tokenizer  # raises where there is none
        except (DataError, RunError, WeightsError) as error:
            raise refused("weights", str(error)) from error
        if model.config.head.num_labels != 1:
            raise refused("weights", f"{weights.path}: {NOT_A_REWARD_MODEL}")
        return model


@function_of.register
def _reward_model(reward: Model, max_completion_length: int | None) -> RewardModel:
    return RewardModel(reward)
