"""Attention under a mask, soft caps and attention sinks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Finite, so that a fully masked row gives no NaN; above the float32 minimum, so that subtracting a row's maximum
# cannot overflow.
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)


def apply_soft_cap(scores: jax.Array, soft_cap: float) -> jax.Array:
    """Bounds scores to (-soft_cap, soft_cap): `soft_cap * tanh(scores / soft_cap)` (Gemma 2, arXiv:2408.00118)."""
    return soft_cap * jnp.tanh(scores / soft_cap)


def apply_sinks(mixed: jax.Array, log_sum: jax.Array, sinks: jax.Array) -> jax.Array:
    """Attention with sinks: each head's softmax has one more score, whose value is zero (arXiv:2508.10925).

    Args:
        mixed: `[B, K, G, T, V]`, the output without sinks.
        log_sum: `[B, K, G, T]` float32, the logsumexp of the unmasked scores.
        sinks: `[N]`, the score of each query head, N = K G.
    """
    score = sinks.astype(jnp.float32).reshape(*mixed.shape[1:3], 1)  # [K, G, 1]
    return (mixed * jax.nn.sigmoid(log_sum - score)[..., None]).astype(mixed.dtype)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245); query head n reads key/value head n // (N / K).

    Keys and values are not repeated: queries are grouped instead.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, S, K, H]`, K a divisor of N.
        value: `[B, S, K, V]`, V often H.
        mask: `[B, T, S]` bool, True where the query attends to the key.
        scale: factor of the scores.
        soft_cap: bounds scores, see `apply_soft_cap`.
        sinks: `[N]`, see `apply_sinks`.

    Returns:
        `[B, T, N, V]` in the dtype of `query`; scores and softmax are float32.
    """
    batch, length, heads, width = query.shape
    groups = heads // key.shape[2]
    # As plain batched matrix products, so that XLA keeps scores in one layout, forward and backward.
    rows = jnp.transpose(query.reshape(batch, length, -1, groups, width), (0, 2, 3, 1, 4))  # [B, K, G, T, H]
    rows = rows.reshape(batch, -1, groups * length, width)
    key, value = (jnp.swapaxes(part, 1, 2) for part in (key, value))  # [B, K, S, H]
    scores = jnp.einsum("bkmh,bksh->bkms", rows, key, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = apply_soft_cap(scores, soft_cap)
    scores = scores.reshape(batch, -1, groups, length, key.shape[2])  # [B, K, G, T, S]
    scores = jnp.where(mask[:, None, None], scores, MASK_VALUE)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    weights = weights.reshape(batch, -1, groups * length, key.shape[2])
    mixed = jnp.einsum("bkms,bksh->bkmh", weights, value).reshape(batch, -1, groups, length, value.shape[-1])
    if sinks is not None:
        mixed = apply_sinks(mixed, jax.nn.logsumexp(scores, axis=-1), sinks)
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(batch, length, heads, -1).astype(query.dtype)
