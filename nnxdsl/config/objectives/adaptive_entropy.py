"""Adaptive entropy: the weight of an entropy bonus follows the entropy of the policy."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.validators import not_negative, positive
from nnxdsl.errors import Problem


@attrs.frozen(kw_only=True)
class AdaptiveEntropy(Spec):
    """A weight of the entropy bonus that grows while the policy's entropy is too low (Skywork-OR1, arXiv:2505.22312).

    After each step the weight grows by `delta` if the mean entropy of the step's tokens was at most `target`, and falls
    by `delta` otherwise. The bonus acts in the next step only if the entropy was at most `target`; there is none in the
    first step. Weight and entropy are part of a checkpoint.

    Attributes:
        target: Mean entropy of a token, in nats; the metric `entropy` early in a run says what is near.
        delta: Change of the weight in a step.
        min_coef: Lower bound of the weight.
        max_coef: Upper bound of the weight.
    """

    target: float = attrs.field(validator=positive)
    delta: float = attrs.field(default=0.005, validator=positive)
    min_coef: float = attrs.field(default=0.0, validator=not_negative)
    max_coef: float = attrs.field(default=1.0, validator=positive)

    def problems(self) -> Iterable[Problem]:
        """The bounds are in order."""
        return gather(super().problems, self._check_bounds)

    def _check_bounds(self) -> Iterable[Problem]:
        if self.min_coef > self.max_coef:
            yield Problem("min_coef", f"is {self.min_coef:g}, above max_coef={self.max_coef:g}")
