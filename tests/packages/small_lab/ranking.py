"""An objective of somebody else's that reads scores of completions, with its head and its loss."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import attrs
import jax
import jax.numpy as jnp

from nnxdsl import Objective, losses
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.program import heads


@attrs.frozen(kw_only=True)
class Ranking(Objective):
    """The squared hinge of two scores: `max(0, margin - (score of chosen - score of rejected))^2`.

    Attributes:
        margin: Between the scores.
    """

    batch_kind: ClassVar[str] = "pairs"

    margin: float = 1.0


class Scores(NamedTuple):
    """Scores of both completions `[B]`, float32."""

    chosen: jax.Array
    rejected: jax.Array


@attrs.frozen
class LastTokens(heads.Head):
    """One number for each completion, from the state of its last token."""

    def network(self, config: DecoderConfig) -> DecoderConfig:
        """The network with one label in place of the vocabulary."""
        return config.with_fields({"head.num_labels": 1})

    def read(self, inputs: heads.HeadInputs, teacher: Any = None) -> heads.HeadOutput:
        """`Scores`, and no statistics of tokens."""
        states = inputs.kind.last_states(inputs.hidden, inputs.batch)  # [B, 2, D]
        scores = jnp.einsum("bsd,ld->sb", states, inputs.model.head(), preferred_element_type=jnp.float32)
        return heads.HeadOutput(Scores(*scores))


@heads.build.register
def _(objective: Ranking) -> heads.Head:
    return LastTokens()


@losses.build.register(Ranking)
def _(objective: Ranking) -> losses.Loss:
    def loss(policy: Scores, reference: None, weight: jax.Array) -> losses.LossTerms:
        margin = policy.chosen - policy.rejected
        accuracy = (margin > 0).astype(jnp.float32)
        return losses.per_row(jax.nn.relu(objective.margin - margin) ** 2, {"rewards/accuracies": accuracy}, weight)

    return loss
