"""Splash attention, the fused kernel for TPUs, on rows of a prompt and its completions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from nnxdsl.models.attention.fused import FusedKernel
from nnxdsl.models.attention.kernel import ScoreOptions
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.attention.view import View
from nnxdsl.models.logical_axes import shard_map_call

LANES = 128
"""The block sizes of splash attention are multiples of this."""

LARGEST_BLOCK = 512


class Splash(FusedKernel):
    """`attend_splash`."""

    name = "splash"
    title = "splash attention"
    platform = "tpu"

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, view: View, scores: ScoreOptions
    ) -> jax.Array:
        """See `AttentionKernel`."""
        self.require_plain(view, scores)
        method = view.method
        assert method.row is not None  # the decoder refuses other kernels without a layout of the row
        options = {"window": method.window, "scale": scores.scale, "soft_cap": scores.soft_cap}
        return attend_splash(query, key, value, view.positions, method.row, **options)


def attend_splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    places: TokenPositions,
    row: RowLayout,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Grouped-query self-attention, equal to `dot_product_attention` for every real token.

    The kernel takes any static mask, and segments for the rest. Tests on CPUs run Pallas' interpreter.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`, K a divisor of N.
        value: `[B, T, K, H]`.
        places: positions of the row's tokens, `[B, T]`.
        row: layout of the row; not packed.
        window: see `attention_mask`.
        scale: factor of the scores.
        soft_cap: bounds scores, see `apply_soft_cap`.
        interpret: runs the kernel in Pallas' interpreter.

    Returns:
        `[B, T, N, H]` in the dtype of `query`.
    """
    # Pallas' kernels for TPUs take a third of a second to import; other devices do not need them.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    if row.packed:
        raise ValueError("the mask of a packed row is not static, so splash attention cannot compute it")
    length = query.shape[1]
    fill = -length % LANES
    size = length + fill
    seen = row.filled(size).sees(window)
    block = next(block for block in range(LARGEST_BLOCK, 0, -LANES) if size % block == 0)

    def run(query: jax.Array, key: jax.Array, value: jax.Array, segment: jax.Array) -> jax.Array:
        heads = query.shape[1]  # of one device
        kernel: Any = splash.make_splash_mha(
            splash.MultiHeadMask([splash.NumpyMask(seen)] * heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=splash.BlockSizes(
                block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
                block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
            ),
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )  # fmt: skip
        return jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=splash.SegmentIds(s, s)))(
            query, key, value, segment
        )

    def by_head(x: jax.Array) -> jax.Array:  # [B, heads, T, H]
        return jnp.swapaxes(jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0))), 1, 2)

    segment = jnp.pad(places.segment_ids, ((0, 0), (0, fill)))
    of_heads, of_kv_heads = (("batch", heads, "length", None) for heads in ("activation_heads", "activation_kv_heads"))
    mixed = shard_map_call(
        run,
        (by_head(query * jnp.asarray(scale, query.dtype)), by_head(key), by_head(value), segment),
        (of_heads, of_kv_heads, of_kv_heads, ("batch", "length")),
        of_heads,
    )
    return jnp.swapaxes(mixed, 1, 2)[:, :length].astype(query.dtype)
