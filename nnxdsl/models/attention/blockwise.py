"""Attention in blocks of queries, each with the keys that it may see; plain XLA, with a custom backward pass.

The sums are those of `dot_product_attention` without most masked scores. A block has all keys of its queries, so its
softmax is an ordinary one. The backward pass recomputes scores (Rabe and Staats, arXiv:2112.05682; Dao et al.,
arXiv:2205.14135) from the queries, the keys and two numbers per query, so the residuals grow linearly with the length
of a row. How many blocks' scores exist at one time is left to XLA, whose CPU compiler computes blocks in parallel.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxdsl.models.attention.dot_product import MASK_VALUE, apply_sinks, apply_soft_cap
from nnxdsl.models.attention.kernel import AttentionKernel, ScoreOptions
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import QUERIES, Block, Range, RowLayout
from nnxdsl.models.attention.view import View

SHORT = 256
"""Slots of a row below which one dense product is as quick as blocks of queries; measured on a CPU."""

MAX_BLOCKS = 64
"""The largest number of blocks of a row: each is compiled separately, so very long rows have larger blocks."""


class Chunked(AttentionKernel):
    """`attend_in_blocks`."""

    name = "chunked"
    title = "blockwise attention"

    def not_worth(self, row: RowLayout) -> str | None:
        """Short rows: one product is as quick."""
        return f"rows of {row.size} slots are short" if row.size < SHORT else None

    def why(self, row: RowLayout) -> str:
        """What blocks save."""
        return f"of rows of {row.size} slots, blocks leave out what no token sees"

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, view: View, scores: ScoreOptions
    ) -> jax.Array:
        """See `AttentionKernel`."""
        method = view.method
        assert method.row is not None  # the decoder refuses other kernels without a layout of the row
        options = {"window": method.window, "is_chunked": method.is_chunked, "queries": method.queries}
        options |= {**scores._asdict(), "selected": view.selected}
        return attend_in_blocks(query, key, value, view.positions, method.row, **options)


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
    is_chunked: bool = False,
    queries: int = QUERIES,
    selected: tuple[jax.Array, ...] | None = None,
) -> jax.Array:
    """Grouped-query self-attention, equal to `dot_product_attention` for every real token.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`, K a divisor of N.
        value: `[B, T, K, V]`, V often H.
        places: positions of the row's tokens, `[B, T]`.
        row: layout of the row; keys that it rules out are not computed.
        window: see `attention_mask`.
        scale: factor of the scores.
        soft_cap: bounds scores, see `apply_soft_cap`.
        sinks: `[N]`, see `apply_sinks`.
        is_chunked: see `attention_mask`; a chunk is within a window of its length.
        queries: slots of a block, see `blocks_of`.
        selected: for each block, `[B, t, s]` bool, the keys among those of the attention mask that each query attends
            to; None for all of them.

    Returns:
        `[B, T, N, V]` in the dtype of `query`; scores and softmax are float32. Padding gives finite values, not
        necessarily those of `dot_product_attention`.
    """
    batch, length, heads, width = query.shape
    groups = heads // key.shape[2]
    blocks = blocks_of(row, window, queries)
    rows = jnp.transpose(query.reshape(batch, length, -1, groups, width), (0, 2, 3, 1, 4))  # [B, K, G, T, H]
    key, value = (jnp.swapaxes(part, 1, 2) for part in (key, value))  # [B, K, T, H]
    attended: Any = _attend(rows, key, value, places, selected, _Static(blocks, window, scale, soft_cap, is_chunked))
    mixed, log_sum = attended
    if sinks is not None:
        mixed = apply_sinks(mixed, log_sum, sinks)
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(batch, length, heads, -1)


def blocks_of(row: RowLayout, window: int | None, queries: int) -> tuple[Block, ...]:
    """The blocks of a row: of `queries` slots each, if that gives no more than `MAX_BLOCKS` of them."""
    return row.blocks(window, max(queries, -(-row.size // MAX_BLOCKS)))


_Selected = tuple[jax.Array, ...] | None


class _Static(NamedTuple):
    """The static arguments of `attend_in_blocks`."""

    blocks: tuple[Block, ...]
    window: int | None
    scale: float
    soft_cap: float | None
    is_chunked: bool


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, places: TokenPositions, selected: _Selected, static: _Static
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries `[B, K, G, T, H]` to keys `[B, K, T, H]` and values `[B, K, T, V]`.

    Returns:
        (`[B, K, G, T, V]`, the logsumexp of the unmasked scores `[B, K, G, T]` float32).
    """
    return _forward(query, key, value, places, selected, static)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, places: TokenPositions, selected: _Selected, static: _Static
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    mixed, highest, total = [], [], []
    for number, block in enumerate(static.blocks):
        _, scores, _ = _scores(query, key, places, selected, number, static)
        top = jnp.max(scores, axis=-1)  # [B, K, G t]
        weights = jnp.exp(scores - top[..., None])
        sums = jnp.sum(weights, axis=-1)
        values = _of(value, block.keys, 2)
        rows = jnp.einsum("bkms,bksh->bkmh", weights.astype(value.dtype), values, preferred_element_type=jnp.float32)
        mixed.append(_ungrouped((rows / sums[..., None]).astype(query.dtype), query))
        highest.append(_ungrouped(top, query))
        total.append(_ungrouped(sums, query))
    out, top, sums = (jnp.concatenate(parts, axis=3) for parts in (mixed, highest, total))
    return (out, top + jnp.log(sums)), (query, key, value, places, selected, top, sums)


def _backward(static: _Static, residuals: tuple[Any, ...], toward: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    query, key, value, places, selected, highest, total = residuals
    toward_mixed, toward_sums = toward
    to_query, to_key, to_value = [], jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for number, block in enumerate(static.blocks):
        rows, scores, slope = _scores(query, key, places, selected, number, static)
        top, sums = (_grouped(part, block.queries)[..., None] for part in (highest, total))  # [B, K, G t, 1]
        weights = jnp.exp(scores - top) / sums
        out = _grouped(toward_mixed, block.queries)  # [B, K, G t, V]
        keys, values = _of(key, block.keys, 2), _of(value, block.keys, 2)
        to_values = jnp.einsum("bkms,bkmh->bksh", weights.astype(out.dtype), out, preferred_element_type=jnp.float32)
        to_weights = jnp.einsum("bkmh,bksh->bkms", out, values, preferred_element_type=jnp.float32)
        mean = jnp.sum(weights * to_weights, axis=-1, keepdims=True)
        to_sums = _grouped(toward_sums, block.queries)[..., None]  # zeros, which XLA leaves out, where they are unused
        to_scores = weights * (to_weights - mean + to_sums) * static.scale
        if slope is not None:
            to_scores = to_scores * slope
        to_scores = to_scores.astype(query.dtype)
        to_rows = jnp.einsum("bkms,bksh->bkmh", to_scores, keys, preferred_element_type=jnp.float32)
        to_query.append(_ungrouped(to_rows.astype(query.dtype), query))
        to_keys = jnp.einsum("bkms,bkmh->bksh", to_scores, rows, preferred_element_type=jnp.float32)
        to_key, to_value = _added(to_key, to_keys, block.keys), _added(to_value, to_values, block.keys)
    return jnp.concatenate(to_query, axis=3), to_key.astype(key.dtype), to_value.astype(value.dtype), None, None


_attend.defvjp(_forward, _backward)


def _scores(
    query: jax.Array, key: jax.Array, places: TokenPositions, selected: _Selected, number: int, static: _Static
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A block's queries `[B, K, G t, H]`, its masked scores `[B, K, G t, s]`, and the derivative of their soft cap."""
    block = static.blocks[number]
    rows = _grouped(query, block.queries)
    keys = _of(key, block.keys, 2)
    scores = jnp.einsum("bkmh,bksh->bkms", rows, keys, preferred_element_type=jnp.float32) * static.scale
    slope = None
    if static.soft_cap is not None:
        scores = apply_soft_cap(scores, static.soft_cap)
        slope = 1 - jnp.square(scores / static.soft_cap)

    def places_of(ranges: tuple[Range, ...]) -> TokenPositions:
        return TokenPositions(*(_of(part, ranges, 1) for part in places))

    if selected is None:
        queries, keys_of = places_of((block.queries,)), places_of(block.keys)
        seen = attention_mask(queries, keys_of, static.window, is_chunked=static.is_chunked)
    else:
        seen = selected[number]
    seen = seen[:, None, None]  # [B, 1, 1, t, s]
    split = (*scores.shape[:2], query.shape[2], -1, scores.shape[-1])
    return rows, jnp.where(seen, scores.reshape(split), MASK_VALUE).reshape(scores.shape), slope


def _of(x: jax.Array, ranges: tuple[Range, ...], axis: int) -> jax.Array:
    """Concatenates ranges of the slots of `x`."""
    parts = [jax.lax.slice_in_dim(x, start, stop, axis=axis) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _added(total: jax.Array, more: jax.Array, ranges: tuple[Range, ...]) -> jax.Array:
    """Adds `more` `[B, K, s, H]` to ranges of the slots of `total` `[B, K, T, H]`."""
    begin = 0
    for start, stop in ranges:
        total = total.at[:, :, start:stop].add(more[:, :, begin : begin + stop - start])
        begin += stop - start
    return total


def _grouped(x: jax.Array, slots: Range) -> jax.Array:
    """`[B, K, G, T, ...]` to `[B, K, G t, ...]`: a range of slots, of all query heads of a key head."""
    part = _of(x, (slots,), 3)
    return part.reshape(*x.shape[:2], -1, *x.shape[4:])


def _ungrouped(x: jax.Array, query: jax.Array) -> jax.Array:
    """`[B, K, G t, ...]` to `[B, K, G, t, ...]`, with the G of `query`."""
    return x.reshape(*x.shape[:2], query.shape[2], -1, *x.shape[3:])
