"""f-divergences between policy and reference, in place of reverse KL."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import inner

if TYPE_CHECKING:
    from nnxdsl.config.objectives import divergence as members


@attrs.frozen(kw_only=True)
class Divergence(Spec):
    """An f-divergence that keeps the policy near its reference (f-DPO, Wang et al. 2023, arXiv:2309.16240).

    A completion's score is `f'(u)`, `u` being its likelihood under the policy over that under the reference, up to a
    constant that makes it 0 where the two are equal. Below, `x = log u` is the log-ratio in nats.
    """

    ReverseKL: ClassVar[type[members.ReverseKL]]
    ForwardKL: ClassVar[type[members.ForwardKL]]
    JensenShannon: ClassVar[type[members.JensenShannon]]
    Alpha: ClassVar[type[members.Alpha]]


@attrs.frozen(kw_only=True)
class ReverseKL(Divergence):
    """The divergence of DPO: the score is the log-ratio, `x`."""


@attrs.frozen(kw_only=True)
class ForwardKL(Divergence):
    """Mode-covering: the score is `1 - exp(-x)`."""


@attrs.frozen(kw_only=True)
class JensenShannon(Divergence):
    """The Jensen-Shannon divergence: the score is `ln 2 + log sigmoid(x)`, bounded above by ln 2."""


@attrs.frozen(kw_only=True)
class Alpha(Divergence):
    """Between reverse KL (as alpha goes to 0) and forward KL (to 1): `(1 - exp(-alpha x)) / alpha`.

    Attributes:
        alpha: The position between the two, as in the paper; TRL's `f_alpha_divergence_coef` is 1 - alpha.
    """

    alpha: float = attrs.field(default=0.5, validator=inner)
