"""The interface of a head: from final hidden states to the inputs of a loss.

A head says what a forward pass is read for: log-probabilities of ids, whole distributions, their top k, or scalars.
`build` in `logprobs.py` selects it by the objective; `program/forward.py` names no head but the default.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import attrs
import jax

from nnxdsl.losses.base import WeightedMean
from nnxdsl.losses.lm_head.token_stats import ShardContext, TokenStats, token_stats
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.program.batches import BatchKind, LossInputs, Targets, kind_of


class HeadOutput(NamedTuple):
    """The output of a head for a micro-batch.

    Attributes:
        loss_inputs: Inputs of the objective's loss; their rows are those of `batch.weight.reshape(-1)`.
        token_stats: Statistics of every target token, of which metrics are means; None for a head without tokens.
    """

    loss_inputs: LossInputs
    token_stats: TokenStats | None = None


@attrs.frozen(eq=False)
class HeadInputs:
    """The final hidden states of a micro-batch, with what is needed to read them.

    Attributes:
        model: The model, which has the weights of the head.
        batch: The micro-batch.
        hidden: Final hidden states, `[B, T, D]`.
        limit: The most tokens whose logits exist at one time, over all devices; None for the platform's default.
        shard_context: Platform and sharding of logits.
    """

    model: Decoder
    batch: Any
    hidden: jax.Array
    limit: int | None
    shard_context: ShardContext

    @property
    def kind(self) -> BatchKind[Any]:
        """The kind of the batch."""
        return kind_of(self.batch)

    @property
    def soft_cap(self) -> float | None:
        """Of the logits; None for none."""
        return self.model.config.head.soft_cap

    def targets(self) -> Targets:
        """The tokens that need a log-probability, and the states that predict them."""
        return self.kind.targets(self.hidden, self.batch)

    def token_stats(
        self,
        targets: Targets,
        temperature: float = 1.0,
        *,
        has_gradient: bool = True,
        has_entropy_gradient: bool = False,
    ) -> TokenStats:
        """Statistics of targets under softmax(logits / temperature)."""
        hidden, head, soft_cap = targets.hidden, self.model.head(), self.soft_cap
        if not has_gradient:
            hidden, head = jax.lax.stop_gradient((hidden, head))
        if temperature != 1:  # of capped logits too: c tanh(z / c) / t is (c / t) tanh((z / t) / (c / t))
            hidden = hidden / temperature
            soft_cap = None if soft_cap is None else soft_cap / temperature
        return token_stats(
            hidden,
            head,
            targets.ids,
            targets.mask,
            self.limit,
            soft_cap,
            self.shard_context,
            has_entropy_gradient=has_entropy_gradient,
        )


class Head:
    """What a forward pass is read for; members are frozen attrs classes."""

    temperature: ClassVar[float] = 1.0
    """What logits of tokens are divided by."""

    def network(self, config: DecoderConfig) -> DecoderConfig:
        """The network that the head reads, from that of the model: with an output head over the vocabulary.

        Another one where the head has its own weights; the head that a directory has does not matter.
        """
        return config if config.head.num_labels is None else config.with_fields({"head.num_labels": None})

    def of_teacher(self) -> Head:
        """The head of the teacher's forward pass, whose loss inputs `read` gets.

        Raises:
            NotImplementedError: It compares the model with no teacher.
        """
        raise NotImplementedError

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """The inputs of the loss.

        Args:
            inputs: Final hidden states of the model.
            teacher: Outputs of a teacher for the same batch; None without one.
        """
        raise NotImplementedError

    def metrics(self, kind: BatchKind[Any], inputs: LossInputs, weight: jax.Array) -> dict[str, WeightedMean]:
        """Metrics from the policy's loss inputs and the weight of each row, beside those of the loss."""
        return {}
