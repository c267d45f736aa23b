"""Norms of a decoder; no jax."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

from nnxdsl.models.config.checks import require_above_zero, require_choices

NormPlacement = Literal["pre", "sandwich", "post"]
NormScale = Literal["plain", "wide", "zero_centred"]

_CHOICES = {
    "placement": get_args(NormPlacement),
    "linear_placement": (None, *get_args(NormPlacement)),
    "scale": get_args(NormScale),
    "final_scale": (None, *get_args(NormScale)),
}


@attrs.frozen(kw_only=True)
class NormConfig:
    """RMSNorms of the residual stream: where they are, and what they compute.

    Attributes:
        eps: added to the mean square in every RMSNorm.
        post_eps: as `eps`, in the norms after a mixer or a feed-forward (Muse Glimmer); None for that.
        placement: "pre": a norm before attention and one before the MLP; "sandwich": one after each as well, before
            the sum with the residual stream; "post": only those after (OLMo 2, arXiv:2501.00656).
        linear_placement: of the linear layers, where it is another than `placement` (OLMo Hybrid); None for that.
        scale: "plain": the scale is initialized with 1 and applied after rounding (Llama); "wide": as plain, applied
            before rounding (Gemma 4); "zero_centred": it is initialized with 0, and 1 + scale is applied before
            rounding (Gemma).
        final_scale: of the norm after all layers, where it is another than `scale` (Muse Glimmer); None for that.
    """

    eps: float = 1e-6
    post_eps: float | None = None
    placement: NormPlacement = "pre"
    linear_placement: NormPlacement | None = None
    scale: NormScale = "plain"
    final_scale: NormScale | None = None

    def __attrs_post_init__(self) -> None:
        require_choices(self, "norm.", _CHOICES)
        require_above_zero(self, "norm.", "eps", "post_eps")
