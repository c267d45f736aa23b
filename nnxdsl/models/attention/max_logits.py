"""The largest attention score of each query head in a call, which QK-clip reads; recorded while a model is traced.

Scores are computed a second time, in blocks of queries and forward only, whatever kernel computes attention: fused
kernels do not return them. The product is written as in `dot_product_attention`, so that XLA may share the two.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nnxdsl.models.attention.blockwise import blocks_of
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import Range
from nnxdsl.models.attention.view import View
from nnxdsl.models.recording import Recorder

_recorder: Recorder[jax.Array] = Recorder("max_logits")
recording_max_logits, layer_max_logits = _recorder.recording, _recorder.layer
"""Within `recording_max_logits(True)`, the layers of a decoder that is traced give the largest score of each head."""


def record_max_logits(query: jax.Array, key: jax.Array, view: View, scale: float) -> None:
    """Records the result of `max_logits` for the layer that is traced, if these are recorded."""
    _recorder.record(lambda: max_logits(query, key, view, scale))


def max_logits(query: jax.Array, key: jax.Array, view: View, scale: float) -> jax.Array:
    """The largest score of each query head over all pairs (token, token that it attends to), padding left out.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`, K a divisor of N.
        view: masks and positions of this call, without a cache.
        scale: factor of the scores.

    Returns:
        `[N]` float32, before a soft cap and without sinks; carries no gradient. -inf if there is no token.
    """
    query, key = jax.lax.stop_gradient((query, key))
    batch, length, heads, width = query.shape
    rows = jnp.transpose(query.reshape(batch, length, key.shape[2], -1, width), (0, 2, 3, 1, 4))  # [B, K, G, T, H]
    keys = jnp.swapaxes(key, 1, 2)  # [B, K, T, H]
    positions, method = view.positions, view.method
    is_real = positions.segment_ids > 0
    if view.mask is not None:
        return _largest(rows, keys, view.mask & is_real[:, :, None], scale).reshape(heads)
    assert method.row is not None  # the decoder refuses other kernels without a layout of the row
    largest = []
    for number, block in enumerate(blocks_of(method.row, method.window, method.queries)):
        queries, others = (_of_slots(positions, ranges) for ranges in ((block.queries,), block.keys))
        if view.selected is None:
            seen = attention_mask(queries, others, method.window, is_chunked=method.is_chunked)
        else:
            seen = view.selected[number]
        block_rows = jax.lax.slice_in_dim(rows, *block.queries, axis=3)
        seen = seen & (queries.segment_ids > 0)[:, :, None]
        largest.append(_largest(block_rows, _slots(keys, block.keys, 2), seen, scale))
    return jnp.max(jnp.stack(largest), axis=0).reshape(heads)


def _largest(rows: jax.Array, keys: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    """The largest scores `[K, G]` of queries `[B, K, G, t, H]` and keys `[B, K, s, H]` where `seen` `[B, t, s]`."""
    batch, kv_heads, groups, length, width = rows.shape
    flat = rows.reshape(batch, kv_heads, groups * length, width)
    scores = jnp.einsum("bkmh,bksh->bkms", flat, keys, preferred_element_type=jnp.float32) * scale
    scores = scores.reshape(batch, kv_heads, groups, length, -1)
    return jnp.max(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=(0, 3, 4))


def _slots(x: jax.Array, ranges: tuple[Range, ...], axis: int) -> jax.Array:
    """Concatenates ranges of the slots of `x`."""
    parts = [jax.lax.slice_in_dim(x, start, stop, axis=axis) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _of_slots(positions: TokenPositions, ranges: tuple[Range, ...]) -> TokenPositions:
    return TokenPositions(*(_slots(part, ranges, 1) for part in positions))
