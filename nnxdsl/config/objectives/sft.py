"""Supervised fine-tuning."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.core.base import declared, gather
from nnxdsl.config.core.validators import Limit
from nnxdsl.config.objectives.base import Objective
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class SFT(Objective):
    """Supervised fine-tuning: mean negative log-likelihood of the target tokens of the whole batch.

    Attributes:
        loss_on: Which tokens are targets: "assistant" for the assistant's turns of a conversation, or a completion of
            text; "last_assistant" for the last of these turns alone; "completion" for all that follows the prompt, in
            rows of `prompt` and `completion`, of any role (results of tools too); "all" for every token after the
            first.
        z_loss: Strength of an auxiliary loss that keeps logits from drifting: the mean square of log Z, the natural
            log of what the softmax divides by, over target tokens (PaLM, arXiv:2204.02311, which has 1e-4); 0 for none.
        mtp_loss_weight: Strength of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2, which has 0.3
            and later 0.1): the mean negative log-likelihood of the target tokens that are predicted one token earlier,
            by a layer of their own (`mtp_layers` of the model), is added to the loss in training; 0 for none.
    """

    batch_kind: ClassVar[str] = "sequences"
    is_token_sum: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = frozenset({"mtp_loss_weight"})

    loss_on: Literal["assistant", "last_assistant", "completion", "all"] = "assistant"
    z_loss: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_loss_weight: float = attrs.field(default=0.0, validator=Limit(at_least=0))

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Multi-token prediction needs a layer for it, which is trained with all of its weights."""
        if self.mtp_loss_weight:
            return gather(lambda: self._check_mtp_layers(experiment), lambda: self._check_mtp_training(experiment))
        return ()

    def _check_mtp_layers(self, experiment: Experiment) -> Iterable[Problem]:
        model = experiment.model
        if not model.mtp_layers:
            cure = "set model.mtp_layers=1" if "mtp_layers" in declared(type(model)) else "set 0"
            message = f"has no effect: {type(model).__qualname__} has no multi-token prediction (MTP) layer; {cure}"
            yield Problem("objective.mtp_loss_weight", message)

    def _check_mtp_training(self, experiment: Experiment) -> Iterable[Problem]:
        for field, given in (("adapter", experiment.adapter), ("quantization", experiment.quantization)):
            if given is not None:
                message = f"an MTP layer is trained whole, without {type(given).__qualname__}; set 0, or {field}=None"
                yield Problem("objective.mtp_loss_weight", message)
