"""How gradients become updates. optax does it: `nnxdsl/program/optimizer.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.spec.base import Spec
from nnxdsl.spec.limits import not_negative, positive, probability
from nnxdsl.spec.schedule import Schedule

if TYPE_CHECKING:
    from nnxdsl.spec import optimizer as members


@attrs.frozen(kw_only=True)
class Optimizer(Spec):
    """The update rule of the trainable parameters.

    Attributes:
        schedule: The learning rate.
        max_grad_norm: Gradients with a larger global norm are scaled down to it; None leaves them as they are.
    """

    AdamW: ClassVar[type[members.AdamW]]
    SGD: ClassVar[type[members.SGD]]

    schedule: Schedule
    max_grad_norm: float | None = attrs.field(default=1.0, validator=positive)


@attrs.frozen(kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Attributes:
        schedule: The learning rate.
        max_grad_norm: Gradients with a larger global norm are scaled down to it; None leaves them as they are.
        b1: Decay of the running mean of gradients.
        b2: Decay of the running mean of squared gradients.
        eps: Added to the root of the latter.
        weight_decay: Decay per unit of learning rate; norm scales and other vectors are not decayed.
    """

    b1: float = attrs.field(default=0.9, validator=probability)
    b2: float = attrs.field(default=0.999, validator=probability)
    eps: float = attrs.field(default=1e-8, validator=positive)
    weight_decay: float = attrs.field(default=0.0, validator=not_negative)


@attrs.frozen(kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent.

    Attributes:
        schedule: The learning rate.
        max_grad_norm: Gradients with a larger global norm are scaled down to it; None leaves them as they are.
        momentum: Decay of the velocity; None keeps none.
    """

    momentum: float | None = attrs.field(default=None, validator=probability)
