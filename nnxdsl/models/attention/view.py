"""What all layers of one call share: masks, positions and rotary angles, by kind of layer."""

from __future__ import annotations

from typing import NamedTuple

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.models.attention.kv_cache import Cache, concat_positions, ring_positions
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import AttentionMethod
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind
from nnxdsl.models.layers.rope import rope_tables


class View(NamedTuple):
    """What layers of one kind, local or global, share in one call.

    Attributes:
        method: how attention is computed.
        positions: of this call's tokens, `[B, T]`.
        mask: `[B, T, S]` bool, True where a token sees another, those of the cache first; None where the method needs
            no mask of all slots.
        rope: (sin, cos), each `[B, T, turned // 2]` float32; empty where nothing turns.
    """

    method: AttentionMethod
    positions: TokenPositions
    mask: jax.Array | None
    rope: tuple[jax.Array, jax.Array]


class Context(NamedTuple):
    """What all layers of one call share.

    Attributes:
        local_view: of layers with a window; None if no layer is local.
        global_view: of layers that attend over everything; None if no layer is global.
        linear_view: of layers without attention; None if no layer is linear.
    """

    local_view: View | None
    global_view: View | None
    linear_view: View | None

    def view(self, kind: LayerKind) -> View:
        """That of a kind of layer that there is."""
        found = {"local": self.local_view, "global": self.global_view, "linear": self.linear_view}[kind]
        assert found is not None  # `context` makes one for each kind
        return found


def context(
    config: DecoderConfig,
    positions: TokenPositions,
    cache: Cache | None = None,
    method: AttentionMethod = AttentionMethod(),  # noqa: B008 - frozen
) -> Context:
    """Masks and rotary angles of one call, for tokens at `positions` `[B, T]` that attend to a cache and each other."""

    def view(window: int | None, rope: tuple[jax.Array, jax.Array]) -> View:
        keys = positions
        if cache is not None:
            keys = concat_positions(cache.positions if window is None else ring_positions(cache, window), positions)
        own = attrs.evolve(method, window=window)
        return View(own, positions, attention_mask(positions, keys, window) if own.kernel == "dense" else None, rope)

    local_view = global_view = linear_view = None
    if "local" in config.layers:
        rope = config.rope_local or config.rope_global
        local_view = view(config.window, rope_tables(positions.positions, config.head_dim, rope))
    if "global" in config.layers + config.mtp_layer_kinds:
        global_view = view(None, rope_tables(positions.positions, config.head_dim, config.rope_global))
    if "linear" in config.layers:
        nothing = jnp.zeros((*positions.positions.shape, 0), jnp.float32)
        linear_view = View(attrs.evolve(method, window=None), positions, None, (nothing, nothing))
    return Context(local_view, global_view, linear_view)
