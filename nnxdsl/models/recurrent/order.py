"""The partial order of a row's tokens: which tokens, and which memories between chunks, each of them follows.

A row may have several sequences, and a prompt several branches. A token follows the tokens of its own segment that are
of the prompt or of its own branch, and two memories are passed between chunks: that of the tokens so far, and that of
their prompt, from which a second branch continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Chunk = TypeVar("Chunk")
"""A pytree of a recurrence's inputs for chunks."""

CHUNK = 64
"""Tokens of a chunk; a power of two."""

_EXACT = jax.lax.Precision.HIGHEST  # for sums of logarithms: no bfloat16 on accelerators


class Order(NamedTuple):
    """The partial order of tokens: a token follows earlier ones of its segment, in its own branch or in branch 0.

    Tokens of a segment are adjacent, those of branch 0 first, then those of each other branch.

    Attributes:
        segment: `[B, T]` int32; 0 is padding, which has no effect. An initial memory belongs to segment 1.
        branch: `[B, T]` int32; None where all are of branch 0.
    """

    segment: jax.Array
    branch: jax.Array | None


class Decays(NamedTuple):
    """Factors of what tokens and memories give to each other within each chunk, float32; 0 where nothing is given.

    Attributes:
        within: `[n, B, K, G, C, C]`, from a token (second) to one that follows it.
        entering: `[n, B, K, G, M, C]`, from each memory before the chunk to a token.
        leaving: `[n, B, K, G, M, C]`, from a token to each memory after the chunk.
        lasting: `[n, B, K, G, M, M]`, from a memory before the chunk (second) to one after it.
    """

    within: jax.Array
    entering: jax.Array
    leaving: jax.Array
    lasting: jax.Array


def decays(order: Order, decay: jax.Array) -> Decays:
    """The factors of chunks.

    Args:
        order: of tokens by chunk, `[n, B, C]`.
        decay: `[n, B, K, G, C]` float32, the logarithm of a memory's decay at each token; 0 or less.
    """
    paths = _paths(order.segment, order.branch)
    since = jnp.einsum("nbij,nbkgj->nbkgi", paths.follows.astype(jnp.float32), decay, precision=_EXACT)
    at_end = jnp.einsum("nbmj,nbkgj->nbkgm", paths.ends.astype(jnp.float32), decay, precision=_EXACT)
    return Decays(
        within=_masked_exp(since[..., :, None] - since[..., None, :], paths.follows[:, :, None, None]),
        entering=_masked_exp(since[..., None, :], paths.enters[:, :, None, None]),
        leaving=_masked_exp(at_end[..., None] - since[..., None, :], paths.ends[:, :, None, None]),
        lasting=_masked_exp(at_end[..., None], paths.lasts[:, :, None, None]),
    )


def by_chunk(x: jax.Array, chunk: int) -> jax.Array:
    """`[n, B, C, ...]` of `[B, T, ...]`, with zeros after the last token."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)


def order_by_chunk(order: Order, chunk: int) -> Order:
    """The order of the tokens of chunks, `[n, B, C]`."""
    return Order(by_chunk(order.segment, chunk), None if order.branch is None else by_chunk(order.branch, chunk))


def heads_by_chunk(x: jax.Array, chunk: int) -> jax.Array:
    """`[n, B, heads ..., C, width]` of `[B, T, heads ..., width]`, with zeros after the last token."""
    return jnp.moveaxis(by_chunk(x, chunk), 2, x.ndim - 1)


def scan_chunks(
    through_chunk: Callable[[jax.Array, Chunk], tuple[jax.Array, jax.Array]],
    memory: jax.Array,
    chunks: Chunk,
    memories: int,
    length: int,
) -> tuple[jax.Array, jax.Array]:
    """Passes a row's memories through its chunks.

    Args:
        through_chunk: from the memories `[B, K, G, M, ...]` and a chunk, those after it and its output
            `[B, K, G, C, ...]`.
        memory: `[B, K, G, ...]`, before the row.
        chunks: the inputs of all chunks, each with a leading axis of n.
        memories: M, those that are passed between chunks.
        length: T of the row.

    Returns:
        (the output `[B, T, K, G, ...]`, the memory after the last real token).
    """
    after, out = jax.lax.scan(
        # Saved for the backward pass are the memories between chunks, and everything computed for all chunks at once.
        jax.checkpoint(through_chunk, prevent_cse=False),
        jnp.repeat(memory[:, :, :, None], memories, axis=3),
        chunks,
    )
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [B, n, C, K, G, ...]
    return out.reshape(len(memory), -1, *out.shape[3:])[:, :length], after[:, :, :, 0]


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


def _paths(segment: jax.Array, branch: jax.Array | None) -> _Paths:
    """How the tokens of chunks `[n, B, C]` follow each other."""
    last = _last(segment)  # of each chunk [n, B]: the last real token up to its end
    segment_after = jnp.where(last.exists, last.of(segment), 1)
    segment_before = jnp.concatenate([jnp.ones_like(segment_after[:1]), segment_after[:-1]])
    follows = jnp.tril(segment[..., :, None] == segment[..., None, :])
    enters, ends = segment == segment_before[..., None], segment == segment_after[..., None]
    lasts = segment_after == segment_before
    if branch is None:
        return _Paths(follows, enters[:, :, None], ends[:, :, None], lasts[..., None, None])
    branch_after = jnp.where(last.exists, last.of(branch), 0)
    branch_before = jnp.concatenate([jnp.zeros_like(branch_after[:1]), branch_after[:-1]])
    follows &= _sees(branch[..., :, None], branch[..., None, :])
    same, own_after = _sees(branch, branch_before[..., None]), _sees(branch_after, branch_before)
    # Within the prompt both memories are equal, so the prompt's memory depends on itself only.
    of_prompt = jnp.stack([jnp.zeros_like(own_after), jnp.ones_like(own_after)], axis=-1)
    return _Paths(
        follows,
        jnp.stack([enters & same, enters & ~same], axis=2),
        jnp.stack([ends & _sees(branch_after[..., None], branch), ends & (branch == 0)], axis=2),
        lasts[..., None, None] & jnp.stack([jnp.stack([own_after, ~own_after], axis=-1), of_prompt], axis=-2),
    )


def _sees(branch: jax.Array, other: jax.Array) -> jax.Array:
    return (other == 0) | (other == branch)


class _Last(NamedTuple):
    """A slot of the row for each chunk `[B, n]`, or -1."""

    slot: jax.Array

    @property
    def exists(self) -> jax.Array:  # [n, B]
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


def _masked_exp(logarithm: jax.Array, where: jax.Array) -> jax.Array:
    """The exponential where `where`, else 0; without infinities, so that gradients are finite."""
    return jnp.where(where, jnp.exp(jnp.where(where, logarithm, 0.0)), 0.0)
