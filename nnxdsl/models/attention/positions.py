"""Positions, segments and branches of tokens, by which masks are made."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenPositions(NamedTuple):
    """Where each token of each row stands; three int32 arrays `[B, T]`.

    Token i sees token j if both are of one segment, j is of the shared prefix or of i's own branch, and j's position
    is not behind i's; on local layers j's position is also less than a window before i's. Padding is segment 0: it
    sees only padding, and no real token sees it.

    Attributes:
        positions: RoPE position and causal order, counted within the sequence.
        segment_ids: 0 for padding, 1 and up for the sequences of a row.
        branch_ids: 0 for a shared prefix (or a plain sequence), 1 and up for continuations that do not see each other.
    """

    positions: jax.Array
    segment_ids: jax.Array
    branch_ids: jax.Array


def positions_right_padded(length: jax.Array, size: int) -> TokenPositions:
    """Places of plain sequences that begin at slot 0.

    Args:
        length: `[B]` tokens of each row.
        size: slots of a row.

    Returns:
        Places of `[B, size]`.
    """
    slot = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (length.shape[0], size))  # [B, T]
    return TokenPositions(slot, (slot < length[:, None]).astype(jnp.int32), jnp.zeros_like(slot))


def positions_left_padded(length: jax.Array, size: int) -> TokenPositions:
    """Places of plain sequences that end at the last slot; positions still count from the first token.

    Args:
        length: `[B]` tokens of each row.
        size: slots of a row.

    Returns:
        Places of `[B, size]`; padding has position 0.
    """
    position = jnp.arange(size, dtype=jnp.int32)[None, :] - (size - length[:, None].astype(jnp.int32))  # [B, T]
    return TokenPositions(jnp.maximum(position, 0), (position >= 0).astype(jnp.int32), jnp.zeros_like(position))
