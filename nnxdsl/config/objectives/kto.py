"""Objectives on unpaired feedback: single completions, desirable or not; `losses/kto.py` computes them."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from typing import ClassVar

import attrs

from nnxdsl.config.core.validators import not_negative, positive
from nnxdsl.config.objectives.multi_token import WithMTP


@attrs.frozen(kw_only=True)
class KTO(WithMTP):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306, equation 7): unpaired feedback.

    Per completion `w (1 - sigmoid(beta (l - k)))` where it is desirable and `u (1 - sigmoid(beta (k - l)))` where it is
    not. `l` is the log-probability of the completion under the policy minus that under the reference, in nats, and `k`
    the mean of the same over completions of other prompts, at least 0 and without a gradient: an estimate of the KL
    divergence from the reference. `k` is a mean over the batch, whatever its micro-batches; held-out batches have their
    own.

    Attributes:
        beta: Strength of the pull towards the reference; rewards are `beta` times log-ratios, in nats.
        desirable_weight: The weight `w`; one of the two should make up for unequal numbers of both kinds.
        undesirable_weight: The weight `u`.
    """

    batch_kind: ClassVar[str] = "feedback"
    needs_reference: ClassVar[bool] = True
    compares_across_batch: ClassVar[bool] = True

    beta: float = attrs.field(default=0.1, validator=positive)
    desirable_weight: float = attrs.field(default=1.0, validator=positive)
    undesirable_weight: float = attrs.field(default=1.0, validator=positive)
    mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)
