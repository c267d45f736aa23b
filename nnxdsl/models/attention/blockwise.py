"""Attention in blocks of queries, each with the keys that it may see; plain XLA, with a backward pass of its own.

The same sums as `attention.attend`, without the scores that a mask throws away. A block has all keys of its queries, so
it is an ordinary softmax. The backward pass computes scores again (Rabe and Staats, arXiv:2112.05682; Dao et al.,
arXiv:2205.14135) from the queries, the keys and two numbers a query: what is kept between both grows with the length of
a row, and not with its square. How many blocks' scores exist at one time is left to XLA, whose CPU compiler computes
blocks side by side.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxdsl.models.attention.dot_product import MASK_VALUE, apply_sinks, apply_soft_cap
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import QUERIES, Block, Range, RowLayout

MOST = 64
"""Blocks of a row: each is compiled by itself, so very long rows have larger ones."""


def attend_in_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    places: TokenPositions,
    row: RowLayout,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    queries: int = QUERIES,
) -> jax.Array:
    """Grouped-query attention of a row with itself; as `attention.attend` for every real token.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`, K a divisor of N.
        value: `[B, T, K, V]`, V often H.
        places: of the row's tokens, `[B, T]`.
        row: how the row is laid out; what it rules out is not computed.
        window: as of `attention.mask`.
        scale: what scores are multiplied by.
        soft_cap: as of `attention.attend`.
        sinks: likewise.
        queries: slots of a block, if that makes no more than `MOST` of them.

    Returns:
        `[B, T, N, V]` in the dtype of `query`; scores and softmax are float32. Padding gives finite numbers, which
        need not be those of `attend`.
    """
    batch, length, heads, width = query.shape
    groups = heads // key.shape[2]
    blocks = row.blocks(window, max(queries, -(-length // MOST)))
    rows = jnp.transpose(query.reshape(batch, length, -1, groups, width), (0, 2, 3, 1, 4))  # [B, K, G, T, H]
    key, value = (jnp.swapaxes(part, 1, 2) for part in (key, value))  # [B, K, T, H]
    found: Any = _attend(rows, key, value, places, _How(blocks, window, scale, soft_cap))
    mixed, log_sum = found
    if sinks is not None:
        mixed = apply_sinks(mixed, log_sum, sinks)
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(batch, length, heads, -1)


class _How(NamedTuple):
    """What is known of a call when it is traced; as of `attend_in_blocks`."""

    blocks: tuple[Block, ...]
    window: int | None
    scale: float
    soft_cap: float | None


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, places: TokenPositions, how: _How
) -> tuple[jax.Array, jax.Array]:
    """From queries `[B, K, G, T, H]`, keys `[B, K, T, H]` and values `[B, K, T, V]`: what is mixed, and log sums.

    Returns:
        (`[B, K, G, T, V]`, log of the sum of the exponentials of the scores that are seen `[B, K, G, T]` float32).
    """
    return _forward(query, key, value, places, how)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, places: TokenPositions, how: _How
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    mixed, highest, total = [], [], []
    for block in how.blocks:
        _, scores, _ = _scores(query, key, places, block, how)
        top = jnp.max(scores, axis=-1)  # [B, K, G t]
        weights = jnp.exp(scores - top[..., None])
        sums = jnp.sum(weights, axis=-1)
        values = _of(value, block.keys, 2)
        rows = jnp.einsum("bkms,bksh->bkmh", weights.astype(value.dtype), values, preferred_element_type=jnp.float32)
        mixed.append(_ungrouped((rows / sums[..., None]).astype(query.dtype), query))
        highest.append(_ungrouped(top, query))
        total.append(_ungrouped(sums, query))
    out, top, sums = (jnp.concatenate(parts, axis=3) for parts in (mixed, highest, total))
    return (out, top + jnp.log(sums)), (query, key, value, places, top, sums)


def _backward(how: _How, residuals: tuple[Any, ...], toward: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    query, key, value, places, highest, total = residuals
    toward_mixed, toward_sums = toward
    to_query, to_key, to_value = [], jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for block in how.blocks:
        rows, scores, slope = _scores(query, key, places, block, how)
        top, sums = (_grouped(part, block.queries)[..., None] for part in (highest, total))  # [B, K, G t, 1]
        weights = jnp.exp(scores - top) / sums
        out = _grouped(toward_mixed, block.queries)  # [B, K, G t, V]
        keys, values = _of(key, block.keys, 2), _of(value, block.keys, 2)
        to_values = jnp.einsum("bkms,bkmh->bksh", weights.astype(out.dtype), out, preferred_element_type=jnp.float32)
        to_weights = jnp.einsum("bkmh,bksh->bkms", out, values, preferred_element_type=jnp.float32)
        mean = jnp.sum(weights * to_weights, axis=-1, keepdims=True)
        to_sums = _grouped(toward_sums, block.queries)[
            ..., None
        ]  # zeros, which XLA leaves out, where nobody reads them
        to_scores = weights * (to_weights - mean + to_sums) * how.scale
        if slope is not None:
            to_scores = to_scores * slope
        to_scores = to_scores.astype(query.dtype)
        to_rows = jnp.einsum("bkms,bksh->bkmh", to_scores, keys, preferred_element_type=jnp.float32)
        to_query.append(_ungrouped(to_rows.astype(query.dtype), query))
        to_keys = jnp.einsum("bkms,bkmh->bksh", to_scores, rows, preferred_element_type=jnp.float32)
        to_key, to_value = _added(to_key, to_keys, block.keys), _added(to_value, to_values, block.keys)
    return jnp.concatenate(to_query, axis=3), to_key.astype(key.dtype), to_value.astype(value.dtype), None


_attend.defvjp(_forward, _backward)


def _scores(
    query: jax.Array, key: jax.Array, places: TokenPositions, block: Block, how: _How
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A block's queries `[B, K, G t, H]`, its masked scores `[B, K, G t, s]`, and the slope of their cap if any."""
    rows = _grouped(query, block.queries)
    keys = _of(key, block.keys, 2)
    scores = jnp.einsum("bkmh,bksh->bkms", rows, keys, preferred_element_type=jnp.float32) * how.scale
    slope = None
    if how.soft_cap is not None:
        scores = apply_soft_cap(scores, how.soft_cap)
        slope = 1 - jnp.square(scores / how.soft_cap)

    def places_of(ranges: tuple[Range, ...]) -> TokenPositions:
        return TokenPositions(*(_of(part, ranges, 1) for part in places))

    seen = attention_mask(places_of((block.queries,)), places_of(block.keys), how.window)[
        :, None, None
    ]  # [B, 1, 1, t, s]
    split = (*scores.shape[:2], query.shape[2], -1, scores.shape[-1])
    return rows, jnp.where(seen, scores.reshape(split), MASK_VALUE).reshape(scores.shape), slope


def _of(x: jax.Array, ranges: tuple[Range, ...], axis: int) -> jax.Array:
    """Slots of `x`, side by side."""
    parts = [jax.lax.slice_in_dim(x, start, stop, axis=axis) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _added(total: jax.Array, more: jax.Array, ranges: tuple[Range, ...]) -> jax.Array:
    """`total` with `more` added to these of its slots; `[B, K, T, H]` and `[B, K, s, H]`."""
    at = 0
    for start, stop in ranges:
        total = total.at[:, :, start:stop].add(more[:, :, at : at + stop - start])
        at += stop - start
    return total


def _grouped(x: jax.Array, slots: Range) -> jax.Array:
    """`[B, K, G t, ...]`, the slots of all queries that read one key, of `[B, K, G, T, ...]`."""
    part = _of(x, (slots,), 3)
    return part.reshape(*x.shape[:2], -1, *x.shape[4:])


def _ungrouped(x: jax.Array, query: jax.Array) -> jax.Array:
    """`[B, K, G, t, ...]` of `[B, K, G t, ...]`, with the groups of `query`."""
    return x.reshape(*x.shape[:2], query.shape[2], -1, *x.shape[3:])
