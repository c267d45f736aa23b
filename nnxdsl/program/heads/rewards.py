"""The head of reward models: one number for each completion."""

from __future__ import annotations

from typing import Any

import attrs
import jax.numpy as jnp

from nnxdsl.config.objectives.reward_model import Reward
from nnxdsl.data.batch import PackedPairs, PairBatch
from nnxdsl.losses.reward_model import PairRewards
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.program.heads.base import Head, HeadInputs, HeadOutput
from nnxdsl.program.heads.logprobs import build


@attrs.frozen
class PairRewardHead(Head):
    """The rewards of both completions of a pair, from the state of the last token of each."""

    def network(self, config: DecoderConfig) -> DecoderConfig:
        """The network with one label in place of the vocabulary."""
        return config.with_fields({"head.num_labels": 1})

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """`PairRewards`, and no statistics of tokens."""
        states = inputs.kind.last_states(inputs.hidden, inputs.batch)  # [B, 2, D]
        chosen, rejected = jnp.einsum("bsd,ld->sb", states, inputs.model.head(), preferred_element_type=jnp.float32)
        assert isinstance(inputs.batch, PairBatch | PackedPairs)
        margin = inputs.batch.margin
        return HeadOutput(PairRewards(chosen, rejected, None if margin is None else margin.reshape(-1)))


@build.register
def _(objective: Reward) -> Head:
    return PairRewardHead()
