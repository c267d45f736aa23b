"""Positions, segments and branches of tokens, and shared prefixes, which determine attention masks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenPositions(NamedTuple):
    """Position, segment and branch of each token; three int32 arrays `[B, T]`.

    Token i attends to token j if both are of one segment, j is of the shared prefix or of i's own branch, and j's
    position is at most i's; on local layers also greater than i's minus the window. Padding is segment 0, which attends
    only to padding.

    Attributes:
        positions: RoPE position and causal order, counted within the sequence.
        segment_ids: 0 for padding, 1 and up for the sequences of a row.
        branch_ids: 0 for a shared prefix (or a plain sequence), 1 and up for continuations, which do not attend to each
            other.
    """

    positions: jax.Array
    segment_ids: jax.Array
    branch_ids: jax.Array


class PrefixRows(NamedTuple):
    """Which rows of a cache begin with which prefix; see `kv_cache.Prefixes`.

    Attributes:
        rows: of each prefix its rows, `[U, G]`; where it has fewer, any others.
        place: of each row, its place in `rows.reshape(-1)`, `[B]`.
        is_token: of each prefix, which of its slots have a token `[U, P]` bool; padding has none.
    """

    rows: jax.Array
    place: jax.Array
    is_token: jax.Array


def sequence_lengths(positions: TokenPositions) -> jax.Array:
    """Tokens of the sequence of each token up to the last one in this call, `[B, T]` int32.

    A sequence that continues in several branches is as long as with the longest of them.
    """

    def of_row(position: jax.Array, segment: jax.Array) -> jax.Array:
        return jax.ops.segment_max(position, segment, num_segments=position.size + 1)[segment] + 1

    return jax.vmap(of_row)(positions.positions, positions.segment_ids)


def positions_right_padded(length: jax.Array, size: int) -> TokenPositions:
    """Positions of sequences that begin at slot 0.

    Args:
        length: `[B]` tokens of each row.
        size: slots of a row.

    Returns:
        Positions `[B, size]`.
    """
    slot = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (length.shape[0], size))  # [B, T]
    return TokenPositions(slot, (slot < length[:, None]).astype(jnp.int32), jnp.zeros_like(slot))


def positions_left_padded(length: jax.Array, size: int) -> TokenPositions:
    """Positions of sequences that end at the last slot; positions count from the first token.

    Args:
        length: `[B]` tokens of each row.
        size: slots of a row.

    Returns:
        Positions `[B, size]`; padding has position 0.
    """
    position = jnp.arange(size, dtype=jnp.int32)[None, :] - (size - length[:, None].astype(jnp.int32))  # [B, T]
    return TokenPositions(jnp.maximum(position, 0), (position >= 0).astype(jnp.int32), jnp.zeros_like(position))
