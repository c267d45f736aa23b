"""In which number formats a run computes."""

from __future__ import annotations

from typing import Literal

import attrs

from nnxdsl.config.core.base import Spec


@attrs.frozen(kw_only=True)
class Precision(Spec):
    """Number formats.

    Trainable parameters, their gradients and optimizer states are always float32, and so are norms, softmax,
    log-probabilities and sums.

    Attributes:
        compute: Format of activations and matrix products; "auto" is float32 on CPUs and bfloat16 elsewhere.
        frozen: Format in which frozen weights that are not quantised are kept; "auto" is that of `compute`.
    """

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    frozen: Literal["auto", "float32", "bfloat16"] = "auto"
