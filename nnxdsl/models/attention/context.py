"""Masks, positions and rotary tables that all layers of a call share, by kind of layer."""

from __future__ import annotations

from typing import NamedTuple

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.models.attention.kernels import find_kernel
from nnxdsl.models.attention.kv_cache import Cache, SharedKV, concat_positions, ring_positions
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions, sequence_lengths
from nnxdsl.models.attention.row_layout import AttentionMethod
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind
from nnxdsl.models.layers.rope import rope_tables


class Context(NamedTuple):
    """The inputs that all layers share in a call.

    Attributes:
        local_view: of local layers; None if there are none.
        global_view: of global layers; None if there are none.
        linear_view: of linear layers and of those without a mixer; None if there are none.
        nope_view: of layers without rotary positions; None if there are none.
        per_layer: vectors of the tokens for each layer of a group, `[B, T, layers, P]`; None without
            `per_layer_embedding`.
        shared_kv: by kind, the keys and values that the layers of `kv_sharing` read; None for all other layers.
    """

    local_view: View | None
    global_view: View | None
    linear_view: View | None
    nope_view: View | None = None
    per_layer: jax.Array | None = None
    shared_kv: dict[LayerKind, SharedKV] | None = None

    def view(self, kind: LayerKind) -> View:
        """The view of a kind of layer that the decoder has."""
        views = {"local": self.local_view, "global": self.global_view, "linear": self.linear_view}
        views |= {"nope": self.nope_view, "none": self.linear_view}
        found = views[kind]
        assert found is not None  # `context` makes one for each kind
        return found


def context(
    config: DecoderConfig,
    positions: TokenPositions,
    cache: Cache | None = None,
    method: AttentionMethod = AttentionMethod(),  # noqa: B008 - frozen
) -> Context:
    """Masks and rotary tables of a call, for tokens at `positions` `[B, T]` that attend to a cache and each other."""
    uses_mask = find_kernel(method.kernel).uses_mask

    def view(window: int | None, rope: tuple[jax.Array, jax.Array]) -> View:
        keys = positions
        if cache is not None:
            before = cache.positions
            if window is not None:
                before = ring_positions(cache, cache.layers[config.layers.index("local")].key.shape[-2])
            keys = concat_positions(before, positions)
        is_chunked = window is not None and config.window_kind == "chunks"
        own = attrs.evolve(method, window=window, is_chunked=is_chunked)
        mask = attention_mask(positions, keys, window, is_chunked=is_chunked) if uses_mask else None
        return View(own, positions, mask, rope)

    # With a cache too: a sequence that is long stays long, and the sampler refuses those that become long.
    length = None if config.short_length is None else sequence_lengths(positions)
    local_view = global_view = linear_view = nope_view = None
    nothing = jnp.zeros((*positions.positions.shape, 0), jnp.float32)
    if "local" in config.layers:
        rope = config.rope_local or config.rope_global
        local_view = view(config.window, rope_tables(positions.positions, config.head_dim, rope, length))
    if "global" in config.layers + config.mtp_layer_kinds:
        head_dim = config.of("global").head_dim
        global_view = view(None, rope_tables(positions.positions, head_dim, config.rope_global, length))
    if {"linear", "none"} & set(config.layers):
        linear_view = View(attrs.evolve(method, window=None), positions, None, (nothing, nothing))
    if "nope" in config.layers:
        nope_view = view(None, (nothing, nothing))
    return Context(local_view, global_view, linear_view, nope_view)
