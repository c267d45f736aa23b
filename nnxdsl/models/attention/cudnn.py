"""Attention by the fused kernels of accelerators: cuDNN's for GPUs, splash attention for TPUs.

cuDNN's kernel knows rows that begin at their first slot, their lengths, and causal order with a window. So the row of a
pair becomes two such rows, `[prompt | chosen]` and `[prompt | rejected]`, each moved to its first slot, and what comes
out is moved back; the prompt's queries are taken from one of both, in which they are the same. Splash attention takes
any mask that is known when it is traced, and segments for the rest, so rows stay as they are.

The forms around the kernels are tested on CPUs, with XLA's attention in cuDNN's place and Pallas' interpreter in that
of a TPU; which kernel serves what is said by `program/attention_kernel.py`.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.attention.splash import _one_row, _parts, _rolled, _two_rows


def attend_cudnn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    places: TokenPositions,
    row: RowLayout,
    *,
    window: int | None,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Grouped-query attention of a row with itself; as `attention.attend` for every real token.

    Args:
        query: `[B, T, N, H]`.
        key: `[B, T, K, H]`, K a divisor of N.
        value: `[B, T, K, H]`.
        places: of the row's tokens, `[B, T]`.
        row: how the row is laid out; not packed.
        window: as of `attention.mask`.
        scale: what scores are multiplied by.
        implementation: of `jax.nn.dot_product_attention`.

    Returns:
        `[B, T, N, H]` in the dtype of `query`; zero for padding.
    """
    if row.packed:
        raise ValueError("cuDNN's attention has no segments: a packed row cannot be computed by it")
    real = places.segment_ids > 0  # [B, T]
    # Whatever the kernel leaves in unused slots, forward or backward, goes no further.
    query, key, value = (jnp.where(real[:, :, None, None], x, 0) for x in (query, key, value))
    lengths = [jnp.sum(part, axis=1) for part in _parts(real, row)]  # each [B]
    first, *others = lengths
    if not others:
        mixed = _causal(query, key, value, first, window, scale, implementation)
    else:
        shift = row.parts[0] - first  # slots of padding before the prompt
        lengths = jnp.stack([first + other for other in others], axis=1)  # [B, 2]
        rows = (_rolled(_two_rows(x, row), shift) for x in (query, key, value))  # each [B, 2, P + R, heads, H]
        query, key, value = (x.reshape(-1, *x.shape[2:]) for x in rows)  # rows of one pair stay on one device
        mixed = _causal(query, key, value, lengths.reshape(-1), window, scale, implementation)
        mixed = _one_row(_rolled(mixed.reshape(*lengths.shape, *mixed.shape[1:]), -shift), row)
    return jnp.where(real[:, :, None, None], mixed, 0)


def _causal(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    length: jax.Array,
    window: int | None,
    scale: float,
    implementation: Literal["cudnn", "xla"],
) -> jax.Array:
    """Causal attention in rows that begin at their first slot."""
    length = jnp.maximum(length, 1).astype(jnp.int32)  # an empty row would be 0 / 0
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        is_causal=True,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
