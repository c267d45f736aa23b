"""What is optimised: the family, and what learns from sequences. Members that learn from pairs are in `preference.py`.

Losses live in `losses/base.py` and `losses/preference.py`; here is only what a person chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit

if TYPE_CHECKING:
    from nnxdsl.config.objectives import base as members
    from nnxdsl.config.objectives import distillation, grpo, kto
    from nnxdsl.config.objectives import preference as pairs


@attrs.frozen(kw_only=True)
class Objective(Spec):
    """The loss of a run; members hold just the numbers that their own formula reads."""

    SFT: ClassVar[type[members.SFT]]
    DPO: ClassVar[type[pairs.DPO]]
    RobustDPO: ClassVar[type[pairs.RobustDPO]]
    IPO: ClassVar[type[pairs.IPO]]
    Hinge: ClassVar[type[pairs.Hinge]]
    LengthNormalizedDPO: ClassVar[type[pairs.LengthNormalizedDPO]]
    EXO: ClassVar[type[pairs.EXO]]
    DiscoPOP: ClassVar[type[pairs.DiscoPOP]]
    NCA: ClassVar[type[pairs.NCA]]
    BCO: ClassVar[type[pairs.BCO]]
    SPPO: ClassVar[type[pairs.SPPO]]
    APOZero: ClassVar[type[pairs.APOZero]]
    APODown: ClassVar[type[pairs.APODown]]
    AOT: ClassVar[type[pairs.AOT]]
    AOTUnpaired: ClassVar[type[pairs.AOTUnpaired]]
    ORPO: ClassVar[type[pairs.ORPO]]
    SimPO: ClassVar[type[pairs.SimPO]]
    CPO: ClassVar[type[pairs.CPO]]
    ChosenSFT: ClassVar[type[pairs.ChosenSFT]]
    Sum: ClassVar[type[pairs.Sum]]
    Distill: ClassVar[type[distillation.Distill]]
    GRPO: ClassVar[type[grpo.GRPO]]
    KTO: ClassVar[type[kto.KTO]]

    reads: ClassVar[str] = ""
    """What kind of batch it reads: "pairs", "feedback" or "sequences". Third-party members set it too."""
    needs_reference: ClassVar[bool] = False
    """Whether it compares the policy with a frozen reference model."""
    of_difference: ClassVar[bool] = False
    """Where it has one: whether the loss of a pair is one of a difference of log-ratios, or of scores of them."""
    sums_tokens: ClassVar[bool] = False
    """Where it reads sequences: whether it sums over target tokens, whichever sequence they belong to."""
    over_batch: ClassVar[bool] = False
    """Whether the loss of a row depends on the other rows: a batch in parts is then asked about once before."""

    @property
    def added(self) -> tuple[Objective, ...]:
        """What it is a sum of: itself alone, if it is none."""
        return (self,)


@attrs.frozen(kw_only=True)
class SFT(Objective):
    """Supervised fine-tuning: mean negative log-likelihood of the target tokens of the whole batch.

    Attributes:
        loss_on: Which tokens are targets: "assistant" for the assistant's turns of a conversation, or a completion of
            text; "completion" for all that follows the prompt, in rows of `prompt` and `completion`, whoever says it
            (answers of tools too); "all" for every token after the first.
        z_loss: Strength of an auxiliary loss that keeps logits from drifting: the mean square of log Z, the natural
            log of what the softmax divides by, over target tokens (PaLM, arXiv:2204.02311, which has 1e-4); 0 for none.
        mtp_weight: Strength of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2, which has 0.3 and
            later 0.1): the mean negative log-likelihood of the target tokens that are predicted one token earlier, by a
            layer of their own (`mtp_layers` of the model), is added to the loss in training; 0 for none.
    """

    reads: ClassVar[str] = "sequences"
    sums_tokens: ClassVar[bool] = True
    later_fields: ClassVar[frozenset[str]] = frozenset({"mtp_weight"})

    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    z_loss: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_weight: float = attrs.field(default=0.0, validator=Limit(at_least=0))
