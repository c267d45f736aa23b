"""How the learning rate moves over a run. The curves are in `nnxdsl/program/optimizer.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.spec.base import Spec
from nnxdsl.spec.limits import fraction, not_negative, positive

if TYPE_CHECKING:
    from nnxdsl.spec import schedule as members


@attrs.frozen(kw_only=True)
class Schedule(Spec):
    """The learning rate as a function of the optimizer step."""

    Constant: ClassVar[type[members.Constant]]
    WarmupCosine: ClassVar[type[members.WarmupCosine]]
    WarmupLinear: ClassVar[type[members.WarmupLinear]]


@attrs.frozen(kw_only=True)
class Constant(Schedule):
    """The same rate at every step.

    Attributes:
        lr: Learning rate.
    """

    lr: float = attrs.field(validator=not_negative)


@attrs.frozen(kw_only=True)
class WarmupCosine(Schedule):
    """Linear from zero to the peak, then half a cosine down (Loshchilov & Hutter 2017, arXiv:1608.03983).

    Attributes:
        peak_lr: Learning rate at the end of the warm-up.
        warmup_ratio: Part of all steps that the warm-up takes.
        final_ratio: Rate that is reached as the run ends, as a part of the peak.
    """

    peak_lr: float = attrs.field(validator=positive)
    warmup_ratio: float = attrs.field(default=0.1, validator=fraction)
    final_ratio: float = attrs.field(default=0.0, validator=fraction)


@attrs.frozen(kw_only=True)
class WarmupLinear(Schedule):
    """Linear from zero to the peak, then linear down.

    Attributes:
        peak_lr: Learning rate at the end of the warm-up.
        warmup_ratio: Part of all steps that the warm-up takes.
        final_ratio: Rate that is reached as the run ends, as a part of the peak.
    """

    peak_lr: float = attrs.field(validator=positive)
    warmup_ratio: float = attrs.field(default=0.1, validator=fraction)
    final_ratio: float = attrs.field(default=0.0, validator=fraction)
