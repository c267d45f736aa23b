"""The gated delta rule, in chunks of tokens or token by token.

A head's memory is a matrix S that maps keys to values. Each token decays it, corrects the value at the token's own key,
and reads it (Yang et al., arXiv:2412.06464):

    S <- exp(decay) S;    S <- S + key (rate (value - S^T key))^T;    out = S^T query

The corrections of a chunk are solved together. With D[i, j] the decay from token j to token i, the correction of token
i is linear in those before it, (I + below) change = rate (value - value read from the memory before the chunk), with
below[i, j] = rate_i (key_i . key_j) D[i, j] for j < i (Yang et al., arXiv:2406.06484): one triangular matrix for each
chunk and head, and matrix products for the rest.

This holds for any partial order of tokens. A row may have several sequences, and a prompt several branches. A token
then follows the tokens of its own segment that are of the prompt or of its own branch, and two memories are passed
between chunks: that of the tokens so far, and that of their prompt, from which a second branch continues.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
"""Tokens of a chunk; a power of two."""

_ROWS = 16  # size of a triangular matrix that is inverted row by row
_EXACT = jax.lax.Precision.HIGHEST  # for sums of logarithms and for the inverse: no bfloat16 on accelerators


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


class Order(NamedTuple):
    """The partial order of tokens: a token follows earlier ones of its segment, in its own branch or in branch 0.

    Tokens of a segment are adjacent, those of branch 0 first, then those of each other branch.

    Attributes:
        segment: `[B, T]` int32; 0 is padding, which has no effect. An initial memory belongs to segment 1.
        branch: `[B, T]` int32; None where all are of branch 0.
    """

    segment: jax.Array
    branch: jax.Array | None


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
    batch, length = order.segment.shape
    if not length:
        return jnp.zeros(tokens.value.shape, jnp.float32), memory
    chunk = min(chunk, 1 << (length - 1).bit_length())
    fill = -length % chunk

    def by_chunk(x: jax.Array) -> jax.Array:  # [n, B, heads ..., C, width ...] of [B, T, heads ..., width ...]
        x = jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    real = order.segment[:, :, None, None] > 0
    decay, rate = (jnp.where(real, x, 0.0) for x in (tokens.decay, tokens.rate))
    query, key = _unit(tokens.query) * tokens.query.shape[-1] ** -0.5, _unit(tokens.key)
    query, key = (jnp.swapaxes(by_chunk(x), 2, 3) for x in (query, key))  # [n, B, K, C, H]
    value = jnp.moveaxis(by_chunk(tokens.value.astype(jnp.float32)), 2, 4)  # [n, B, K, G, C, V]
    decay, rate = (jnp.moveaxis(by_chunk(x), 2, 4) for x in (decay, rate))  # [n, B, K, G, C]
    paths = _paths(by_chunk(order.segment), None if order.branch is None else by_chunk(order.branch))

    since = jnp.einsum("nbij,nbkgj->nbkgi", paths.follows.astype(jnp.float32), decay, precision=_EXACT)
    at_end = jnp.einsum("nbmj,nbkgj->nbkgm", paths.ends.astype(jnp.float32), decay, precision=_EXACT)
    within = _decay(since[..., :, None] - since[..., None, :], paths.follows[:, :, None, None])  # [n, B, K, G, C, C]
    alike, read = (jnp.einsum("nbkid,nbkjd->nbkij", x, key)[:, :, :, None] for x in (key, query))
    each = _Chunk(
        query,
        key,
        value,
        rate,
        solved=_inverse(jnp.tril(rate[..., None] * alike * within, -1)),
        read=read * within,
        entering=_decay(since[..., None, :], paths.enters[:, :, None, None]),
        leaving=_decay(at_end[..., None] - since[..., None, :], paths.ends[:, :, None, None]),
        lasting=_decay(at_end[..., None], paths.lasts[:, :, None, None]),
    )
    states = paths.enters.shape[2]
    memories, out = jax.lax.scan(
        # Saved for the backward pass are the memories between chunks, and everything computed for all chunks at once.
        jax.checkpoint(_through_chunk, prevent_cse=False),
        jnp.repeat(memory[:, :, :, None], states, axis=3),
        each,
    )
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [B, n, C, K, G, V]
    return out.reshape(batch, -1, *out.shape[3:])[:, :length], memories[:, :, :, 0]


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


class _Paths(NamedTuple):
    """The order within each chunk, and towards the M memories before and after it; all bool.

    Attributes:
        follows: `[n, B, C, C]`, whether the first token follows or is the second.
        enters: `[n, B, M, C]`, whether a token follows all of a memory.
        ends: `[n, B, M, C]`, whether a memory after the chunk follows a token.
        lasts: `[n, B, M, M]`, whether a memory after the chunk (first) follows one before it.
    """

    follows: jax.Array
    enters: jax.Array
    ends: jax.Array
    lasts: jax.Array


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

    def given(x: jax.Array) -> jax.Array:  # values read from the memories before the chunk
        found = jnp.einsum("bkid,bkgmdv->bkgmiv", x, memory)
        return jnp.sum(chunk.entering[..., None] * found, axis=3)

    change = chunk.solved @ (chunk.rate[..., None] * (chunk.value - given(chunk.key)))  # [B, K, G, C, V]
    out = given(chunk.query) + chunk.read @ change
    lasting = jnp.sum(chunk.lasting[..., None, None] * memory[:, :, :, None], axis=4)
    added = jnp.einsum("bkjd,bkgmjv->bkgmdv", chunk.key, chunk.leaving[..., None] * change[:, :, :, None])
    return lasting + added, out


def _paths(segment: jax.Array, branch: jax.Array | None) -> _Paths:
    """How the tokens of chunks `[n, B, C]` follow each other."""
    last = _last(segment)  # of each chunk [n, B]: the last real token up to its end
    segment_after = jnp.where(last.found, last.of(segment), 1)
    segment_before = jnp.concatenate([jnp.ones_like(segment_after[:1]), segment_after[:-1]])
    follows = jnp.tril(segment[..., :, None] == segment[..., None, :])
    enters, ends = segment == segment_before[..., None], segment == segment_after[..., None]
    lasts = segment_after == segment_before
    if branch is None:
        return _Paths(follows, enters[:, :, None], ends[:, :, None], lasts[..., None, None])
    branch_after = jnp.where(last.found, last.of(branch), 0)
    branch_before = jnp.concatenate([jnp.zeros_like(branch_after[:1]), branch_after[:-1]])
    follows &= _sees(branch[..., :, None], branch[..., None, :])
    own, own_after = _sees(branch, branch_before[..., None]), _sees(branch_after, branch_before)
    # Within the prompt both memories are equal, so the prompt's memory depends on itself only.
    of_prompt = jnp.stack([jnp.zeros_like(own_after), jnp.ones_like(own_after)], axis=-1)
    return _Paths(
        follows,
        jnp.stack([enters & own, enters & ~own], axis=2),
        jnp.stack([ends & _sees(branch_after[..., None], branch), ends & (branch == 0)], axis=2),
        lasts[..., None, None] & jnp.stack([jnp.stack([own_after, ~own_after], axis=-1), of_prompt], axis=-2),
    )


def _sees(branch: jax.Array, other: jax.Array) -> jax.Array:
    return (other == 0) | (other == branch)


class _Last(NamedTuple):
    """A slot of the row for each chunk `[B, n]`, or -1."""

    slot: jax.Array

    @property
    def found(self) -> jax.Array:  # [n, B]
        return (self.slot >= 0).T

    def of(self, x: jax.Array) -> jax.Array:
        """`[n, B]` of `[n, B, C]`: the entry of that slot."""
        row = jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1)
        return jnp.take_along_axis(row, jnp.maximum(self.slot, 0), axis=1).T


def _last(segment: jax.Array) -> _Last:
    chunks, batch, size = segment.shape
    real = jnp.swapaxes(segment, 0, 1).reshape(batch, -1) > 0
    slot = jax.lax.cummax(jnp.where(real, jnp.arange(chunks * size), -1), axis=1)
    return _Last(slot[:, size - 1 :: size])


def _decay(logarithm: jax.Array, where: jax.Array) -> jax.Array:
    """The exponential where `where`, else 0; without infinities, so that gradients are finite."""
    return jnp.where(where, jnp.exp(jnp.where(where, logarithm, 0.0)), 0.0)


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


def _with_row(below: jax.Array, number: jax.Array, found: jax.Array) -> jax.Array:
    """Computes one more row of the inverse `[..., C, C]` from those before it."""
    row = jax.lax.dynamic_index_in_dim(below, number, axis=-2, keepdims=False)
    unit = (jnp.arange(row.shape[-1]) == number).astype(row.dtype)
    row = unit - jnp.sum(row[..., :, None] * found, axis=-2)
    return jax.lax.dynamic_update_index_in_dim(found, row, number, axis=-2)


def _inverse_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = _inverse(below)
    return found, found


def _inverse_backward(found: jax.Array, toward: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(found, -1, -2)
    product = partial(jnp.matmul, precision=_EXACT)
    return (-jnp.tril(product(product(turned, toward), turned), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
