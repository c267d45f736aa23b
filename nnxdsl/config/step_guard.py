"""Guards against non-finite and spiking steps; `nnxdsl/optim/step_guard.py` implements them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, positive

if TYPE_CHECKING:
    from nnxdsl.config import step_guard as members

above_one = Limit(above=1)
"""Greater than one."""


@attrs.frozen(kw_only=True)
class Guard(Spec):
    """What happens at a non-finite or spiking step. No run ever continues with weights that such a step has changed.

    Attributes:
        max_in_a_row: The run ends when more steps than these are skipped one after the other.
        max_total: The run ends when more steps than these have been skipped in all.
    """

    Stop: ClassVar[type[members.Stop]]
    Skip: ClassVar[type[members.Skip]]
    SkipSpikes: ClassVar[type[members.SkipSpikes]]


@attrs.frozen(kw_only=True)
class Stop(Guard):
    """A loss or a gradient that is NaN or infinite ends the run; the weights from before that step are saved."""


@attrs.frozen(kw_only=True)
class Skip(Guard):
    """A step whose loss or gradient is NaN or infinite changes neither weights nor optimizer, and is counted.

    The learning rate does not advance either: the schedule counts the steps that were not skipped.
    """

    max_in_a_row: int = attrs.field(default=3, validator=positive)
    max_total: int = attrs.field(default=50, validator=positive)


@attrs.frozen(kw_only=True)
class SkipSpikes(Guard):
    """As `Guard.Skip`, and a step whose gradient or loss is far above that of the steps before it is skipped as well.

    What is usual is the median over a window of steps, skipped ones too, so that what stays higher becomes usual. Until
    the window is full, steps are skipped for NaN and infinities alone.

    Attributes:
        window: Of how many steps the median is taken.
        max_norm_ratio: A gradient norm of more than so many medians is a spike; it is measured before it is clipped.
        max_loss_ratio: A loss of more than so many medians is a spike, for losses above zero; None leaves it unwatched.
    """

    max_in_a_row: int = attrs.field(default=3, validator=positive)
    max_total: int = attrs.field(default=50, validator=positive)
    window: int = attrs.field(default=50, validator=Limit(at_least=2))
    max_norm_ratio: float = attrs.field(default=10.0, validator=above_one)
    max_loss_ratio: float | None = attrs.field(default=None, validator=above_one)
