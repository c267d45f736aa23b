"""The dtypes of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment

KVCacheDtype = Literal["int8"]
"""A dtype of cached keys and values other than that of activations."""


@attrs.frozen(kw_only=True)
class Precision(Spec):
    """Number formats.

    Trainable parameters, their gradients and optimizer states are always float32, and so are norms, softmax,
    log-probabilities and sums.

    Attributes:
        compute: Format of activations and matrix products; "auto" is float32 on CPUs and bfloat16 elsewhere.
        frozen: Format of frozen weights that are not quantized; "auto" is that of `compute`.
    """

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    frozen: Literal["auto", "float32", "bfloat16"] = "auto"

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """A format for frozen weights needs some."""
        if self.frozen != "auto" and experiment.adapter is None and not experiment.frozen:
            message = f"{self.frozen!r} has no effect, since all weights are trained (a reference has the format of "
            yield Problem("precision.frozen", message + "the computation)")
