"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.objectives.base import Objective

if TYPE_CHECKING:
    pass


@attrs.frozen(kw_only=True)
class SFT(Objective):
    """Supervised fine-tuning: mean negative log-likelihood of the target tokens of the whole batch.

    Attributes:
        loss_on: Which tokens are targets: "assistant" for the assistant's turns of a conversation, or a completion of
            text; "completion" for all that follows the prompt, in rows of `prompt` and `completion`, whoever says it
            (answers of tools too); "all" for every token after the first.
        z_loss: Strength of an auxiliary loss that keeps logits from drifting: the mean square of log Z, the natural
            log of what the softmax divides by, over target tokens (PaLM, arXiv:2204.02311, which has 1e-4); 0 for none.
        mtp_loss_weight: Strength of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2, which has 0.3
            and later 0.1): the mean negative log-likelihood of the target tokens that are predicted one token earlier,
            by a layer of their own (`mtp_layers` of the model), is added to the loss in training; 0 for none.
    """

    batch_kind: ClassVar[str] = "sequences"
    is_token_sum: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = frozenset({"mtp_loss_weight"})

    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    z_loss: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_loss_weight: float = attrs.field(default=0.0, validator=Limit(at_least=0))
