"""The gated delta rule, in chunks of tokens or token by token.

A head's memory is a matrix S that maps keys to values. Each token decays it, corrects the value at the token's own key,
and reads it (Yang et al., arXiv:2412.06464):

    S <- exp(decay) S;    S <- S + key (rate (value - S^T key))^T;    out = S^T query

The corrections of a chunk are solved together. With D[i, j] the decay from token j to token i, the correction of token
i is linear in those before it, (I + below) change = rate (value - value read from the memory before the chunk), with
below[i, j] = rate_i (key_i . key_j) D[i, j] for j < i (Yang et al., arXiv:2406.06484): one triangular matrix for each
chunk and head, and matrix products for the rest.

This holds for any partial order of tokens (`recurrent/order.py`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from nnxdsl.models.recurrent.order import CHUNK, Order, decays, heads_by_chunk, order_by_chunk, scan_chunks

_ROWS = 16  # size of a triangular matrix that is inverted row by row
_EXACT = jax.lax.Precision.HIGHEST  # for the inverse: no bfloat16 on accelerators


class Tokens(NamedTuple):
    """The inputs of the rule for each token; K key heads, with G value heads each.

    Attributes:
        query: `[B, T, K, H]`.
        key: `[B, T, K, H]`.
        value: `[B, T, K, G, V]`.
        decay: `[B, T, K, G]` float32, the logarithm of the memory's decay; 0 or less.
        rate: `[B, T, K, G]` float32, the share of an error that is corrected.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    rate: jax.Array


def chunked_delta_rule(
    tokens: Tokens, order: Order, memory: jax.Array, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """The rule over a row, chunk by chunk; queries and keys are normalized to unit length, queries then scaled.

    Args:
        tokens: of the row.
        order: of the tokens.
        memory: `[B, K, G, H, V]` float32, before the row.
        chunk: tokens of a chunk, a power of two.

    Returns:
        (out `[B, T, K, G, V]` float32, the memory after the last real token). Padding gives finite values.
    """
    length = order.segment.shape[1]
    if not length:
        return jnp.zeros(tokens.value.shape, jnp.float32), memory
    chunk = min(chunk, 1 << (length - 1).bit_length())
    in_chunks = partial(heads_by_chunk, chunk=chunk)
    real = order.segment[:, :, None, None] > 0
    decay, rate = (jnp.where(real, x, 0.0) for x in (tokens.decay, tokens.rate))
    query, key = _unit(tokens.query) * tokens.query.shape[-1] ** -0.5, _unit(tokens.key)
    query, key, value = map(in_chunks, (query, key, tokens.value.astype(jnp.float32)))  # [n, B, K, (G,) C, ...]
    decay, rate = (in_chunks(x[..., None])[..., 0] for x in (decay, rate))  # [n, B, K, G, C]
    factors = decays(order_by_chunk(order, chunk), decay)
    alike, read = (jnp.einsum("nbkid,nbkjd->nbkij", x, key)[:, :, :, None] for x in (key, query))
    each = _Chunk(
        query,
        key,
        value,
        rate,
        solved=_inverse(jnp.tril(rate[..., None] * alike * factors.within, -1)),
        read=read * factors.within,
        entering=factors.entering,
        leaving=factors.leaving,
        lasting=factors.lasting,
    )
    return scan_chunks(_through_chunk, memory, each, factors.entering.shape[4], length)


def step(tokens: Tokens, real: jax.Array, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rule for one token of each row.

    Args:
        tokens: with T = 1.
        real: `[B]` bool; where False the memory does not change.
        memory: `[B, K, G, H, V]` float32.

    Returns:
        (out `[B, 1, K, G, V]` float32, the memory after it).
    """
    query, key = _unit(tokens.query[:, 0]) * tokens.query.shape[-1] ** -0.5, _unit(tokens.key[:, 0])  # [B, K, H]
    faded = memory * jnp.exp(tokens.decay[:, 0])[..., None, None]
    error = tokens.value[:, 0].astype(jnp.float32) - jnp.einsum("bkd,bkgdv->bkgv", key, faded)
    after = faded + key[:, :, None, :, None] * (tokens.rate[:, 0, ..., None] * error)[..., None, :]
    after = jnp.where(real[:, None, None, None, None], after, memory)
    return jnp.einsum("bkd,bkgdv->bkgv", query, after)[:, None], after


class _Chunk(NamedTuple):
    """The inputs of a chunk, independent of the memory; with a leading axis of n outside of the scan.

    Attributes:
        query: `[B, K, C, H]`.
        key: `[B, K, C, H]`.
        value: `[B, K, G, C, V]`.
        rate: `[B, K, G, C]`.
        solved: `[B, K, G, C, C]`, the inverse of (I + below).
        read: `[B, K, G, C, C]`, the weight of each correction in a query's output.
        entering: `[B, K, G, M, C]`, the decay of each memory up to a token.
        leaving: `[B, K, G, M, C]`, the decay of a correction up to each memory after the chunk.
        lasting: `[B, K, G, M, M]`, the decay from a memory before the chunk (second) to one after it.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    rate: jax.Array
    solved: jax.Array
    read: jax.Array
    entering: jax.Array
    leaving: jax.Array
    lasting: jax.Array


def _through_chunk(memory: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    """The memories `[B, K, G, M, H, V]` after a chunk, and the outputs of its tokens `[B, K, G, C, V]`."""

    def read(x: jax.Array) -> jax.Array:  # values read from the memories before the chunk
        values = jnp.einsum("bkid,bkgmdv->bkgmiv", x, memory)
        return jnp.sum(chunk.entering[..., None] * values, axis=3)

    change = chunk.solved @ (chunk.rate[..., None] * (chunk.value - read(chunk.key)))  # [B, K, G, C, V]
    out = read(chunk.query) + chunk.read @ change
    lasting = jnp.sum(chunk.lasting[..., None, None] * memory[:, :, :, None], axis=4)
    added = jnp.einsum("bkjd,bkgmjv->bkgmdv", chunk.key, chunk.leaving[..., None] * change[:, :, :, None])
    return lasting + added, out


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length one, float32; with the epsilon of published implementations."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


@jax.custom_vjp
def _inverse(below: jax.Array) -> jax.Array:
    """The inverse of I + below, for what is strictly lower triangular `[..., C, C]`, C a power of two.

    Recursively: the inverse of [[P, 0], [Q, R]] is [[P', 0], [-R' Q P', R']]. This is as exact as substitution, and
    blocks of one size are one batched product. Small blocks are solved row by row, which compiles faster. (A series in
    powers of `below` would overflow.)
    """
    size = below.shape[-1]
    if size <= _ROWS:
        return jax.lax.fori_loop(0, size, partial(_with_row, below), jnp.zeros_like(below))
    half = size // 2
    corners = jnp.stack([below[..., :half, :half], below[..., half:, half:]], axis=-3)
    first, second = jnp.moveaxis(_inverse(corners), -3, 0)
    product = partial(jnp.matmul, precision=_EXACT)
    low = -product(product(second, below[..., half:, :half]), first)
    upper = jnp.concatenate([first, jnp.zeros_like(low)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([low, second], axis=-1)], axis=-2)


def _with_row(below: jax.Array, number: jax.Array, inverse: jax.Array) -> jax.Array:
    """Computes one more row of the inverse `[..., C, C]` from those before it."""
    row = jax.lax.dynamic_index_in_dim(below, number, axis=-2, keepdims=False)
    unit = (jnp.arange(row.shape[-1]) == number).astype(row.dtype)
    row = unit - jnp.sum(row[..., :, None] * inverse, axis=-2)
    return jax.lax.dynamic_update_index_in_dim(inverse, row, number, axis=-2)


def _inverse_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(below)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, toward: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    product = partial(jnp.matmul, precision=_EXACT)
    return (-jnp.tril(product(product(turned, toward), turned), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
