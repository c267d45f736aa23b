"""The protocol of token mixers: attention, latent attention, gated DeltaNet, Mamba-2."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Protocol, Self

import jax
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.mixer import MixerConfig


class Mixer(Protocol):
    """The nnx module that mixes the tokens of a layer; its `MixerConfig` names it."""

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """A mixer of this decoder; its arrays have logical axes as metadata."""
        ...

    @classmethod
    def init_cache(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> Any:
        """The cache of one layer without tokens, a pytree of arrays of zeros; `slots` tokens fit it."""
        ...

    def __call__(self, x: jax.Array, view: View, past: Any) -> tuple[jax.Array, Any]:
        """Maps `[B, T, D]` to `[B, T, D]` and an update of the layer's cache `past`, which may be None."""
        ...


def mixer_class(config: MixerConfig) -> type[Mixer]:
    """The module that its config names."""
    return resolve_name(config.module)
