"""Objectives whose completions multi-token prediction (MTP) can be trained on."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import declared, gather
from nnxdsl.config.objectives.base import Objective
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class WithMTP(Objective):
    """A loss that is a mean over target tokens (`is_token_sum`) or over rows, to which that of MTP can be added.

    Members declare `mtp_loss_weight: float = attrs.field(default=0.0, validator=not_negative)`.

    Attributes:
        mtp_loss_weight: Strength of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2, which has 0.3
            and later 0.1): the mean negative log-likelihood of the target tokens that are predicted one token earlier,
            by a layer of their own (`mtp_layers` of the model), is added to the loss in training; 0 for none. Targets
            of pairs are the chosen completions, and of feedback the desirable ones.
    """

    is_base: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = frozenset({"mtp_loss_weight"})

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Multi-token prediction needs a layer for it, whose weights are trained whole, in float."""
        if self.mtp_loss_weight:
            return gather(lambda: self._check_mtp_layers(experiment), lambda: self._check_mtp_training(experiment))
        return ()

    def _check_mtp_layers(self, experiment: Experiment) -> Iterable[Problem]:
        model = experiment.model
        if not model.mtp_layers:
            remedy = "set model.mtp_layers=1" if "mtp_layers" in declared(type(model)) else "set 0"
            message = f"has no effect: {type(model).__qualname__} has no multi-token prediction (MTP) layer; {remedy}"
            yield Problem("objective.mtp_loss_weight", message)

    def _check_mtp_training(self, experiment: Experiment) -> Iterable[Problem]:
        quantization = experiment.quantization
        if quantization is not None and not quantization.freezes:
            kind = type(quantization).__qualname__
            message = f"an MTP layer is trained whole, without {kind}; set 0, or quantization=None"
            yield Problem("objective.mtp_loss_weight", message)
