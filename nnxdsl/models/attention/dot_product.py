"""Who sees whom, and attention under such a mask; knows tokens' places, not where weights or devices are."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Finite, so that a row that sees nothing gives numbers and no NaN; far from the float32 minimum, so that
# subtracting a row's maximum cannot overflow.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class Places(NamedTuple):
    """Where each token of each row stands; three int32 arrays `[B, T]`.

    Token i sees token j if both are of one segment, j is of the shared prefix or of i's own branch, and j's position
    is not behind i's; on local layers j's position is also less than a window before i's. Padding is segment 0: it
    sees only padding, and no real token sees it.

    Attributes:
        position: RoPE position and causal order, counted within the sequence.
        segment: 0 for padding, 1 and up for the sequences of a row.
        branch: 0 for a shared prefix (or a plain sequence), 1 and up for continuations that must not see each other.
    """

    position: jax.Array
    segment: jax.Array
    branch: jax.Array


def right_padded(length: jax.Array, size: int) -> Places:
    """Places of plain sequences that begin at slot 0.

    Args:
        length: `[B]` tokens of each row.
        size: slots of a row.

    Returns:
        Places of `[B, size]`.
    """
    slot = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (length.shape[0], size))  # [B, T]
    return Places(slot, (slot < length[:, None]).astype(jnp.int32), jnp.zeros_like(slot))


def left_padded(length: jax.Array, size: int) -> Places:
    """Places of plain sequences that end at the last slot; positions still count from the first token.

    Args:
        length: `[B]` tokens of each row.
        size: slots of a row.

    Returns:
        Places of `[B, size]`; padding has position 0.
    """
    position = jnp.arange(size, dtype=jnp.int32)[None, :] - (size - length[:, None].astype(jnp.int32))  # [B, T]
    return Places(jnp.maximum(position, 0), (position >= 0).astype(jnp.int32), jnp.zeros_like(position))


def mask(queries: Places, keys: Places, window: int | None = None) -> jax.Array:
    """Which tokens see which.

    Args:
        queries: places of the tokens that look, `[B, T]`.
        keys: places of the tokens that are looked at, `[B, S]`.
        window: a local layer sees a token and the `window - 1` positions before it; None for a global layer.

    Returns:
        `[B, T, S]` bool, True where the query sees the key.
    """
    query = Places(*(part[:, :, None] for part in queries))  # [B, T, 1]
    key = Places(*(part[:, None, :] for part in keys))  # [B, 1, S]
    seen = (
        (query.segment == key.segment)
        & ((key.branch == 0) | (key.branch == query.branch))
        & (key.position <= query.position)
    )
    return seen if window is None else seen & (query.position - key.position < window)


def capped(scores: jax.Array, soft_cap: float) -> jax.Array:
    """Scores bent into (-soft_cap, soft_cap), nearly as they are where small (Gemma 2, arXiv:2408.00118)."""
    return soft_cap * jnp.tanh(scores / soft_cap)


def sunk(mixed: jax.Array, log_sum: jax.Array, sinks: jax.Array) -> jax.Array:
    """What attention gives where each head's softmax has one score more, whose value is zero (arXiv:2508.10925).

    Args:
        mixed: `[B, K, G, T, V]`, without that score.
        log_sum: `[B, K, G, T]` float32, log of the sum of the exponentials of the scores that are seen.
        sinks: `[N]`, the score of each query head, N = K G.
    """
    score = sinks.astype(jnp.float32).reshape(*mixed.shape[1:3], 1)  # [K, G, 1]
    return (mixed * jax.nn.sigmoid(log_sum - score)[..., None]).astype(mixed.dtype)


def attend(
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
        mask: `[B, T, S]` bool, True where seen.
        scale: what scores are multiplied by.
        soft_cap: bounds scores, see `capped`; None for scores as they are.
        sinks: `[N]`, see `sunk`; None for none.

    Returns:
        `[B, T, N, V]` in the dtype of `query`; scores and softmax are float32.
    """
    batch, length, heads, width = query.shape
    groups = heads // key.shape[2]
    # Batched matrix products in their plain order: XLA then keeps scores in one layout, forward and backward.
    rows = jnp.transpose(query.reshape(batch, length, -1, groups, width), (0, 2, 3, 1, 4))  # [B, K, G, T, H]
    rows = rows.reshape(batch, -1, groups * length, width)
    key, value = (jnp.swapaxes(part, 1, 2) for part in (key, value))  # [B, K, S, H]
    scores = jnp.einsum("bkmh,bksh->bkms", rows, key, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = capped(scores, soft_cap)
    scores = scores.reshape(batch, -1, groups, length, key.shape[2])  # [B, K, G, T, S]
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    weights = weights.reshape(batch, -1, groups * length, key.shape[2])
    mixed = jnp.einsum("bkms,bksh->bkmh", weights, value).reshape(batch, -1, groups, length, value.shape[-1])
    if sinks is not None:
        mixed = sunk(mixed, jax.nn.logsumexp(scores, axis=-1), sinks)
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(batch, length, heads, -1).astype(query.dtype)
