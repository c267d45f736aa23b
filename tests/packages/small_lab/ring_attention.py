"""An attention kernel of another package, in one file: ring attention (Liu et al., arXiv:2310.01889), zig-zag.

`Memory(attention="small_lab.ring_attention:RingAttention")` on a mesh with `context` above 1: each device holds a part
of a row's tokens, and the keys and values of the others pass by in a ring.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.models.attention.dot_product import MASK_VALUE, apply_soft_cap
from nnxdsl.models.attention.kernel import AttentionKernel, CompileTarget, ScoreOptions
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.logical_axes import axis_size, shard_map_call

AXIS = "context"


class RingAttention(AttentionKernel):
    """Blockwise attention over a ring of devices."""

    name = f"{__name__}:RingAttention"
    title = "ring attention"
    length_axis = AXIS
    traced_as = "chunked"

    def supports(self, row: RowLayout, config: DecoderConfig, target: CompileTarget) -> str | None:
        if config.attention.sinks:
            return f"{self.title} has no sinks"
        return f"{self.title} is not computed in a pipeline's stages" if target.stages > 1 else None

    def token_order(self, length: int, shards: int) -> np.ndarray | None:
        """Zig-zag: each device has an early part and a late one, so that all see about as many keys."""
        if length % (2 * shards):
            return None
        parts = np.arange(length).reshape(2 * shards, -1)
        return np.concatenate([parts[[shard, -1 - shard]].ravel() for shard in range(shards)])

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, view: View, scores: ScoreOptions
    ) -> jax.Array:
        of_heads, of_kv_heads = (
            ("batch", "length", heads, None) for heads in ("activation_heads", "activation_kv_heads")
        )
        of_places = (("batch", "length"),) * 3
        run = partial(ring, view=view, scores=scores)
        arrays = (query, key, value, *view.positions)
        return shard_map_call(run, arrays, (of_heads, of_kv_heads, of_kv_heads, *of_places), of_heads)


def ring(
    query: jax.Array, key: jax.Array, value: jax.Array, *places: jax.Array, view: View, scores: ScoreOptions
) -> jax.Array:
    """One device's queries `[B, t, N, H]`, with keys and values `[B, t, K, H]` of one device after another."""
    devices, ours, theirs = axis_size(AXIS), TokenPositions(*places), TokenPositions(*places)
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1]).astype(jnp.float32)
    highest = jnp.full((*grouped.shape[:-1],), MASK_VALUE, jnp.float32)  # [B, t, K, G]
    total, mixed = jnp.zeros_like(highest), jnp.zeros((*highest.shape, value.shape[-1]), jnp.float32)
    for step in range(devices):
        products = jnp.einsum("btkgh,bskh->btkgs", grouped, key.astype(jnp.float32)) * scores.scale
        if scores.soft_cap is not None:
            products = apply_soft_cap(products, scores.soft_cap)
        seen = attention_mask(ours, theirs, view.method.window, is_chunked=view.method.is_chunked)
        products = jnp.where(seen[:, :, None, None], products, MASK_VALUE)
        top = jnp.maximum(highest, jnp.max(products, axis=-1))
        weights, factor = jnp.exp(products - top[..., None]), jnp.exp(highest - top)
        total = total * factor + jnp.sum(weights, axis=-1)
        mixed = mixed * factor[..., None] + jnp.einsum("btkgs,bskh->btkgh", weights, value.astype(jnp.float32))
        highest = top
        if step + 1 < devices:
            to_next = [(device, (device + 1) % devices) for device in range(devices)]
            key, value, theirs = jax.lax.ppermute((key, value, theirs), AXIS, to_next)
    return (mixed / total[..., None]).reshape(*query.shape[:3], -1).astype(query.dtype)
