"""What is optimised. Losses live in `program/losses.py`; here is only what a person chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.spec.base import Spec
from nnxdsl.spec.limits import Limit, positive

if TYPE_CHECKING:
    from nnxdsl.spec import objective as members


@attrs.frozen(kw_only=True)
class Objective(Spec):
    """The loss of a run; members hold just the numbers that their own formula reads."""

    SFT: ClassVar[type[members.SFT]]
    DPO: ClassVar[type[members.DPO]]

    reads: ClassVar[str] = ""
    """What kind of batch it reads: "pairs" or "sequences". Third-party members set it too."""
    needs_reference: ClassVar[bool] = False
    """Whether it compares the policy with a frozen reference model."""
    sums_tokens: ClassVar[bool] = False
    """Where it reads sequences: whether it sums over target tokens, whichever sequence they belong to."""


@attrs.frozen(kw_only=True)
class SFT(Objective):
    """Supervised fine-tuning: mean negative log-likelihood of the target tokens of the whole batch.

    Attributes:
        loss_on: Which tokens are targets: "assistant" for the assistant's turns of a conversation, "all" for every
            token after the first.
        z_loss: Strength of an auxiliary loss that keeps logits from drifting: the mean square of log Z, the natural
            log of what the softmax divides by, over target tokens (PaLM, arXiv:2204.02311, which has 1e-4); 0 for none.
    """

    reads: ClassVar[str] = "sequences"
    sums_tokens: ClassVar[bool] = True

    loss_on: Literal["assistant", "all"] = "assistant"
    z_loss: float = attrs.field(default=0.0, validator=Limit(at_least=0))


@attrs.frozen(kw_only=True)
class DPO(Objective):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    Per pair `-(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)`, where `d` is the policy's log-ratio of chosen to
    rejected minus the reference's, and `e` the label smoothing of conservative DPO (Mitchell 2023).

    Attributes:
        beta: Strength of the pull towards the reference; rewards are `beta` times log-ratios, in nats.
        label_smoothing: Assumed fraction of pairs whose labels are swapped.
    """

    reads: ClassVar[str] = "pairs"
    needs_reference: ClassVar[bool] = True

    beta: float = attrs.field(default=0.1, validator=positive)
    label_smoothing: float = attrs.field(default=0.0, validator=Limit(at_least=0, below=0.5))
