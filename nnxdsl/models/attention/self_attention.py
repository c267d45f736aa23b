"""Attention of a call's tokens to each other and to a cache, by the kernel that the call's method names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from nnxdsl.models.attention.blockwise import attend_in_blocks
from nnxdsl.models.attention.cudnn import attend_cudnn
from nnxdsl.models.attention.dot_product import dot_product_attention
from nnxdsl.models.attention.kv_cache import KV, IndexedKV, attention_with_cache
from nnxdsl.models.attention.max_logits import record_max_logits
from nnxdsl.models.attention.splash import attend_splash

if TYPE_CHECKING:
    from nnxdsl.models.attention.view import View


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    view: View,
    past: KV | IndexedKV | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, KV]:
    """Grouped-query attention of the tokens of a call.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`, K a divisor of N.
        value: `[B, T, K, V]`, V often H.
        view: masks and positions of this call.
        past: keys and values in the layer's cache, or None.
        scale: factor of the scores.
        soft_cap: bounds scores, see `apply_soft_cap`.
        sinks: `[N]`, see `apply_sinks`.

    Returns:
        (`[B, T, N, V]`, the keys and values of this call).

    Raises:
        ValueError: the kernel has no sinks, no soft cap, no chunks or no selection of tokens.
    """
    new = KV(jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))
    if past is not None:
        assert view.mask is not None  # the decoder refuses other kernels with a cache
        return attention_with_cache(query, past, new, view.mask, scale, soft_cap, sinks), new
    record_max_logits(query, key, view, scale)
    if view.mask is not None:
        return dot_product_attention(query, key, value, view.mask, scale, soft_cap, sinks), new
    method, positions = view.method, view.positions
    kernel, row, window = method.kernel, method.row, method.window
    assert row is not None  # the decoder refuses other kernels without a layout of the row
    if kernel == "chunked":
        blocks = {"soft_cap": soft_cap, "sinks": sinks, "queries": method.queries}
        blocks |= {"is_chunked": method.is_chunked, "selected": view.selected}
        return attend_in_blocks(query, key, value, positions, row, window=window, scale=scale, **blocks), new
    if method.is_chunked:
        raise ValueError(f"{kernel} attention has no chunks")
    if view.selected is not None:
        raise ValueError(f"{kernel} attention is to all tokens, not to those that an indexer selects")
    if sinks is not None:
        raise ValueError(f"{kernel} attention has no sinks")
    if kernel == "splash":
        return attend_splash(query, key, value, positions, row, window=window, scale=scale, soft_cap=soft_cap), new
    if soft_cap is not None:
        raise ValueError("cuDNN's attention has no soft cap")
    width = value.shape[-1]
    wide = max(width, key.shape[-1])
    if width != key.shape[-1]:  # cuDNN's kernel needs keys and values of one width
        query, key, value = (
            jnp.pad(part, ((0, 0), (0, 0), (0, 0), (0, wide - part.shape[-1]))) for part in (query, key, value)
        )
    return attend_cudnn(query, key, value, positions, row, window=window, scale=scale)[..., :width], new
