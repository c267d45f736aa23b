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
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer import LayerSpec
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.layers.rope import rope_tables


class Context(NamedTuple):
    """The inputs that all layers share in a call.

    Attributes:
        views: of each kind of layer that the decoder has.
        per_layer: vectors of the tokens for each layer of a group, `[B, T, layers, P]`; None without
            `per_layer_embedding`.
        shared_kv: by kind, the keys and values that the layers of `kv_shared` read; None for all other layers.
        routed_experts: the experts that routers replay in each layer of a group, `[B, T, layers, k]`; None for none.
    """

    views: dict[LayerKind, View]
    per_layer: jax.Array | None = None
    shared_kv: dict[LayerKind, SharedKV] | None = None
    routed_experts: jax.Array | None = None


def context(
    config: DecoderConfig,
    positions: TokenPositions,
    cache: Cache | None = None,
    method: AttentionMethod = AttentionMethod(),  # noqa: B008 - frozen
) -> Context:
    """Masks and rotary tables of a call, for tokens at `positions` `[B, T]` that attend to a cache and each other."""
    uses_mask = find_kernel(method.kernel).uses_mask
    # With a cache too: a sequence that is long stays long, and the sampler refuses those that become long.
    length = None if config.short_length is None else sequence_lengths(positions)
    nothing = jnp.zeros((*positions.positions.shape, 0), jnp.float32)

    def view(kind: LayerKind, layer: LayerSpec) -> View:
        if not layer.is_attention:
            return View(attrs.evolve(method, window=None), positions, None, (nothing, nothing))
        keys, prefix = positions, None
        if cache is not None:
            before = cache.positions
            if layer.window is None and cache.prefixes is not None:
                prefix = cache.prefixes.members
                before = TokenPositions(*(part[:, cache.prefixes.size :] for part in before))
            if layer.window is not None:
                before = ring_positions(cache, cache.layers[config.layers.kinds.index(kind)].key.shape[-2])
            keys = concat_positions(before, positions)
        is_chunked = layer.window is not None and config.window_kind == "chunks"
        layer_method = attrs.evolve(method, window=layer.window, is_chunked=is_chunked)
        mask = attention_mask(positions, keys, layer_method.window, is_chunked=is_chunked) if uses_mask else None
        rope = (nothing, nothing)
        if layer.rope is not None:
            rope = rope_tables(positions.positions, config.of(kind).head_dim, layer.rope, length)
        return View(layer_method, positions, mask, rope, prefix=prefix)

    return Context({kind: view(kind, layer) for kind, layer in config.specs.items()})
