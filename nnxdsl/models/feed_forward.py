"""The protocol of feed-forwards: the gated MLP, a mixture of experts."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Protocol, Self

import jax
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import FeedForwardConfig
from nnxdsl.models.moe.router import RouterStats


class FeedForward(Protocol):
    """The nnx module that each token goes through by itself; its config is a `FeedForwardConfig`, which names it."""

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """A feed-forward of this decoder; its arrays have logical axes as metadata."""
        ...

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, RouterStats | None]:
        """`[B, T, D]` to `[B, T, D]`, and the router's statistics; `real` is `[B, T]` bool, False for padding."""
        ...


def feed_forward_class(config: FeedForwardConfig) -> type[FeedForward]:
    """The module that a config names."""
    return resolve_name(config.module)
