"""The state-space recurrence of Mamba-2 (SSD), in chunks of tokens or token by token.

A head's memory S has `state_size` rows and `head_dim` columns. Each token decays it, adds its input in the direction
of B, and reads it in the direction of C (Dao and Gu, arXiv:2405.21060, equation 2 and section 6):

    S <- exp(decay) S + B (dt x)^T;    out = S^T C

Within a chunk, out_i = sum over j up to i of (C_i . B_j) D[i, j] dt_j x_j with D[i, j] the decay from token j to token
i: matrix products; a scan passes the memory from one chunk to the next. This holds for any partial order of tokens
(`recurrent/order.py`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nnxdsl.models.recurrent.order import CHUNK, Order, decays, heads_by_chunk, order_by_chunk, scan_chunks


class Tokens(NamedTuple):
    """The inputs of the recurrence for each token, float32; K groups of G heads each.

    Attributes:
        c: `[B, T, K, N]`, what a group reads.
        b: `[B, T, K, N]`, where a group writes.
        x: `[B, T, K, G, P]`, the heads' inputs.
        dt: `[B, T, K, G]`, the time steps; 0 or more.
        decay: `[B, T, K, G]`, the logarithm of the memory's decay; 0 or less.
    """

    c: jax.Array
    b: jax.Array
    x: jax.Array
    dt: jax.Array
    decay: jax.Array


def chunked_scan(tokens: Tokens, order: Order, memory: jax.Array, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """The recurrence over a row, chunk by chunk.

    Args:
        tokens: of the row.
        order: of the tokens.
        memory: `[B, K, G, N, P]` float32, before the row.
        chunk: tokens of a chunk, a power of two.

    Returns:
        (out `[B, T, K, G, P]` float32, the memory after the last real token). Padding gives finite values.
    """
    length = order.segment.shape[1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    in_chunks = partial(heads_by_chunk, chunk=chunk)
    real = order.segment[:, :, None, None] > 0
    decay, dt = (jnp.where(real, x, 0.0) for x in (tokens.decay, tokens.dt))
    c, b, value = map(in_chunks, (tokens.c, tokens.b, tokens.x * dt[..., None]))  # [n, B, K, (G,) C, ...]
    factors = decays(order_by_chunk(order, chunk), in_chunks(decay[..., None])[..., 0])
    read = jnp.einsum("nbkid,nbkjd->nbkij", c, b)[:, :, :, None] * factors.within
    each = _Chunk(c, b, value, read @ value, factors.entering, factors.leaving, factors.lasting)
    return scan_chunks(_through_chunk, memory, each, factors.entering.shape[4], length)


def step(tokens: Tokens, real: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The recurrence for one token of each row.

    Args:
        tokens: with T = 1.
        real: `[B]` bool; where False the memory does not change.
        memory: `[B, K, G, N, P]` float32.

    Returns:
        (out `[B, 1, K, G, P]` float32, the memory after it).
    """
    c, b, x, dt, decay = (part[:, 0] for part in tokens)
    added = b[:, :, None, :, None] * (dt[..., None] * x)[..., None, :]
    after = memory * jnp.exp(decay)[..., None, None] + added
    after = jnp.where(real[:, None, None, None, None], after, memory)
    return jnp.einsum("bkd,bkgdp->bkgp", c, after)[:, None], after


class _Chunk(NamedTuple):
    """The inputs of a chunk, independent of the memory; with a leading axis of n outside of the scan.

    Attributes:
        c: `[B, K, C, N]`.
        b: `[B, K, C, N]`.
        value: `[B, K, G, C, P]`, inputs times their time steps.
        within: `[B, K, G, C, P]`, what the tokens read of those of the same chunk.
        entering: `[B, K, G, M, C]`, see `Decays`, as are the next two.
        leaving: `[B, K, G, M, C]`.
        lasting: `[B, K, G, M, M]`.
    """

    c: jax.Array
    b: jax.Array
    value: jax.Array
    within: jax.Array
    entering: jax.Array
    leaving: jax.Array
    lasting: jax.Array


def _through_chunk(memory: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    """The memories `[B, K, G, M, N, P]` after a chunk, and the outputs of its tokens `[B, K, G, C, P]`."""
    values = jnp.einsum("bkid,bkgmdp->bkgmip", chunk.c, memory)
    entering = chunk.entering[..., None]
    # Not `jnp.sum` over the memories: XLA for CPUs crashes with it in the stages of a pipeline (jax 0.10.2).
    out = chunk.within + sum(entering[:, :, :, part] * values[:, :, :, part] for part in range(values.shape[3]))
    lasting = jnp.sum(chunk.lasting[..., None, None] * memory[:, :, :, None], axis=4)
    added = jnp.einsum("bkjd,bkgmjp->bkgmdp", chunk.b, chunk.leaving[..., None] * chunk.value[:, :, :, None])
    return lasting + added, out
