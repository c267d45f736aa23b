"""The objective of reward models."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from typing import ClassVar

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.objectives.base import Objective


@attrs.frozen(kw_only=True)
class Reward(Objective):
    """A reward model of preference pairs (Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1).

    The model's output head is replaced by a linear layer with one output, the reward `r` of a completion, read from the
    state of its last token. The loss is the mean over pairs of `-log sigmoid(r_c - r_r - m) + c (r_c + r_r)^2`, of the
    chosen and the rejected completion, with the coefficient `c` and the margin `m` of a pair (Touvron et al. 2023,
    arXiv:2307.09288, equation 2), 0 unless `margin` of the data names its column.

    Attributes:
        center_rewards_coefficient: The coefficient `c`: the difference of two rewards says nothing about their level,
            and this keeps their mean at zero (Eisenstein et al. 2023, arXiv:2312.09244, which has 0.01); 0 for none.
    """

    batch_kind: ClassVar[str] = "pairs"
    reads_logps: ClassVar[bool] = False
    reads_margins: ClassVar[bool] = True

    center_rewards_coefficient: float = attrs.field(default=0.0, validator=Limit(at_least=0))
