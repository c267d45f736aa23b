"""Learning-rate schedules; `nnxdsl/optim/schedules.py` computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import fraction, not_negative, positive
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config import schedule as members


@attrs.frozen(kw_only=True)
class Schedule(Spec):
    """The learning rate as a function of the optimizer step.

    Attributes:
        peak_lr: Learning rate at the end of the warm-up.
        warmup_ratio: Fraction of all steps in the warm-up.
        final_ratio: Learning rate at the end of the run, as a fraction of the peak.
    """

    Constant: ClassVar[type[members.Constant]]
    WarmupCosine: ClassVar[type[members.WarmupCosine]]
    WarmupLinear: ClassVar[type[members.WarmupLinear]]
    WSD: ClassVar[type[members.WSD]]
    InverseSqrt: ClassVar[type[members.InverseSqrt]]


@attrs.frozen(kw_only=True)
class Constant(Schedule):
    """The same rate at every step.

    Attributes:
        lr: Learning rate.
    """

    lr: float = attrs.field(validator=not_negative)


@attrs.frozen(kw_only=True)
class WarmupCosine(Schedule):
    """Linear from zero to the peak, then half a cosine down (Loshchilov & Hutter 2017, arXiv:1608.03983)."""

    peak_lr: float = attrs.field(validator=positive)
    warmup_ratio: float = attrs.field(default=0.1, validator=fraction)
    final_ratio: float = attrs.field(default=0.0, validator=fraction)


@attrs.frozen(kw_only=True)
class WarmupLinear(Schedule):
    """Linear from zero to the peak, then linear down; with `warmup_ratio=0`, linear down from the first step."""

    peak_lr: float = attrs.field(validator=positive)
    warmup_ratio: float = attrs.field(default=0.1, validator=fraction)
    final_ratio: float = attrs.field(default=0.0, validator=fraction)


@attrs.frozen(kw_only=True)
class WSD(Schedule):
    """Warm-up, stable, decay: linear from zero to the peak, then the peak, then linear down (Hu et al. 2024).

    Of the shapes of the last part (arXiv:2404.06395, section 4), this is the linear one. What was trained up to its
    beginning does not depend on the length of the run.

    Attributes:
        peak_lr: Learning rate between the warm-up and the decay.
        decay_ratio: Fraction of all steps in the decay, at the end of the run.
    """

    peak_lr: float = attrs.field(validator=positive)
    warmup_ratio: float = attrs.field(default=0.05, validator=fraction)
    decay_ratio: float = attrs.field(default=0.1, validator=fraction)
    final_ratio: float = attrs.field(default=0.0, validator=fraction)

    def problems(self) -> Iterable[Problem]:
        """Warm-up and decay must fit into one run, and what a decay ends at needs a decay."""
        if self.warmup_ratio + self.decay_ratio > 1:
            message = f"{self.decay_ratio} and warmup_ratio={self.warmup_ratio} are more than the whole run"
            yield Problem("decay_ratio", message)
        if self.decay_ratio == 0 and self.final_ratio != 0:
            yield Problem("final_ratio", "has no effect without a decay")


@attrs.frozen(kw_only=True)
class InverseSqrt(Schedule):
    """Linear from zero to the peak, then down with the inverse square root of the step (Vaswani et al. 2017).

    `peak_lr * min(step / warmup_steps, sqrt(warmup_steps / step))`, arXiv:1706.03762, section 5.3: it does not depend
    on the length of the run, so the warm-up is counted in steps.

    Attributes:
        warmup_steps: Steps of the warm-up.
    """

    peak_lr: float = attrs.field(validator=positive)
    warmup_steps: int = attrs.field(default=100, validator=positive)
