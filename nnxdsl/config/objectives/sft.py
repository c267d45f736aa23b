"""Supervised fine-tuning."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit, not_negative
from nnxdsl.config.objectives.multi_token import WithMTP


@attrs.frozen(kw_only=True)
class SFT(WithMTP):
    """Supervised fine-tuning: mean negative log-likelihood of the target tokens of the whole batch.

    Attributes:
        loss_on: Which tokens are targets: "assistant" for the assistant's turns of a conversation, or a completion of
            text; "last_assistant" for the last of these turns alone; "completion" for all that follows the prompt, in
            rows of `prompt` and `completion`, of any role (results of tools too); "all" for every token after the
            first.
        z_loss: Strength of an auxiliary loss that keeps logits from drifting: the mean square of log Z, the natural
            log of what the softmax divides by, over target tokens (PaLM, arXiv:2204.02311, which has 1e-4); 0 for none.
    """

    batch_kind: ClassVar[str] = "sequences"
    is_token_sum: ClassVar[bool] = True

    loss_on: Literal["assistant", "last_assistant", "completion", "all"] = "assistant"
    z_loss: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)
