"""Which token attends to which, by position, segment and branch."""

from __future__ import annotations

import jax

from nnxdsl.models.attention.positions import TokenPositions


def attention_mask(
    queries: TokenPositions, keys: TokenPositions, window: int | None = None, *, is_chunked: bool = False
) -> jax.Array:
    """The attention mask of queries and keys.

    Args:
        queries: positions of the queries, `[B, T]`.
        keys: positions of the keys, `[B, S]`.
        window: a local layer attends to a token itself and the `window - 1` positions before it; None for a global one.
        is_chunked: whether it attends within chunks of `window` positions instead.

    Returns:
        `[B, T, S]` bool, True where the query attends to the key.
    """
    query = TokenPositions(*(part[:, :, None] for part in queries))  # [B, T, 1]
    key = TokenPositions(*(part[:, None, :] for part in keys))  # [B, 1, S]
    seen = (
        (query.segment_ids == key.segment_ids)
        & ((key.branch_ids == 0) | (key.branch_ids == query.branch_ids))
        & (key.positions <= query.positions)
    )
    if window is None:
        return seen
    if is_chunked:
        return seen & (query.positions // window == key.positions // window)
    return seen & (query.positions - key.positions < window)
