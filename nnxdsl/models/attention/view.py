"""The inputs that layers of one kind share in a call: positions, masks, rotary tables, and the attention method."""

from __future__ import annotations

from typing import NamedTuple

import jax

from nnxdsl.models.attention.positions import PrefixRows, TokenPositions
from nnxdsl.models.attention.row_layout import AttentionMethod


class View(NamedTuple):
    """The inputs that layers of one kind share in a call.

    Attributes:
        method: how attention is computed.
        positions: of this call's tokens, `[B, T]`.
        mask: `[B, T, S]` bool, True where a token attends to another, those of the cache first; None unless the kernel
            reads it.
        rope: (sin, cos), each `[B, T, rotary dimensions // 2]` float32; empty for linear layers
            and for those without rotary positions or without a mixer.
        selected: for each block of queries, the tokens that an indexer has selected among those of the attention mask;
            None where it has not, and where there is a mask, which then leaves out the others.
        prefix: the rows of the cache's prefixes, whose tokens are not in the mask; None without any.
    """

    method: AttentionMethod
    positions: TokenPositions
    mask: jax.Array | None
    rope: tuple[jax.Array, jax.Array]
    selected: tuple[jax.Array, ...] | None = None
    prefix: PrefixRows | None = None
