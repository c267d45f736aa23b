"""Attention of a call's tokens to each other and to a cache, by the kernel that the call's method names."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nnxdsl.models.attention.kernel import ScoreOptions
from nnxdsl.models.attention.kernels import find_kernel
from nnxdsl.models.attention.kv_cache import KV, IndexedKV, PrefixedKV, attention_with_cache
from nnxdsl.models.attention.max_logits import record_max_logits
from nnxdsl.models.attention.view import View


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    view: View,
    past: KV | IndexedKV | PrefixedKV | None,
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
        assert view.mask is not None  # the decoder refuses kernels without a mask where there is a cache
        return attention_with_cache(query, past, new, view.mask, scale, soft_cap, sinks, view.prefix), new
    record_max_logits(query, key, view, scale)
    kernel = find_kernel(view.method.kernel)
    return kernel(query, key, value, view, ScoreOptions(scale, soft_cap, sinks)), new
