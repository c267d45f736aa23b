"""The static layout of a row: which slots can never attend to which, whatever their tokens; no jax arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import attrs
import jax
import numpy as np

QUERIES = 128
"""Queries of a block on a CPU: few enough for its cache, and many enough for fast products."""

Range = tuple[int, int]
"""First slot, and the slot after the last."""


class Block(NamedTuple):
    """Queries that are computed together.

    Attributes:
        queries: their slots.
        keys: all slots that any of them may attend to, in ascending order.
    """

    queries: Range
    keys: tuple[Range, ...]


@attrs.frozen
class RowLayout:
    """The layout of a row: a shared first part such as a prompt, and parts that each continue it.

    In a row that is not packed, the first part is padded on its left if others follow, and the others on their right.
    The distance of two tokens is then that of their slots, each part counted from the first part's end.

    Attributes:
        parts: number of slots of each part, in the order of the row.
        size: slots of the row; those after the parts are unused.
        packed: whether the row holds any number of sequences one after another.
        in_order: whether slots are in the order of tokens, as above; else any slot may attend to any.
    """

    parts: tuple[int, ...]
    size: int
    packed: bool = False
    in_order: bool = True

    def __attrs_post_init__(self) -> None:
        if not 0 < sum(self.parts) <= self.size or min(self.parts) < 0:
            raise ValueError(f"parts of {self.parts} slots do not fit a row of {self.size} slots")
        if self.packed and len(self.parts) > 1:
            raise ValueError("a packed row must have one part: the lengths of its sequences are not static")

    def filled(self, size: int) -> RowLayout:
        """The same layout with unused slots at its end, `size` in all."""
        return attrs.evolve(self, size=size)

    def blocks(self, window: int | None, block: int) -> tuple[Block, ...]:
        """Divides all slots into blocks of up to `block` queries, with the keys of each.

        Args:
            window: a token sees itself and the `window - 1` positions before it; None for everything before it.
            block: largest number of queries; the blocks of one part have nearly equal sizes.
        """
        return _blocks(self, window, block)

    def sees(self, window: int | None) -> np.ndarray:
        """The static mask, `[size, size]` bool: which query may attend to which key; a superset of every real mask."""
        seen = np.zeros((self.size, self.size), bool)
        for block in self.blocks(window, 1):
            for start, stop in block.keys:
                seen[block.queries[0], start:stop] = True
        return seen


def pair(prompt: int, response: int) -> RowLayout:
    """`[prompt | chosen | rejected]`."""
    return RowLayout((prompt, response, response), prompt + 2 * response)


def sequence(size: int) -> RowLayout:
    """One sequence, padded on its right."""
    return RowLayout((size,), size)


def packed(size: int) -> RowLayout:
    """Any number of sequences one after another, of any lengths."""
    return RowLayout((size,), size, packed=True)


@jax.tree_util.register_static
@attrs.frozen
class AttentionMethod:
    """How layers of one kind compute attention; a static pytree node.

    Attributes:
        kernel: name of the `AttentionKernel`.
        row: layout of the row; None where it is not static, as with a cache.
        window: of local layers; None for global ones.
        is_chunked: whether local layers attend within chunks of `window` tokens.
        queries: size of the blocks of queries.
    """

    kernel: str = "dense"
    row: RowLayout | None = None
    window: int | None = None
    is_chunked: bool = False
    queries: int = QUERIES


@lru_cache(maxsize=256)
def _blocks(row: RowLayout, window: int | None, block: int) -> tuple[Block, ...]:
    reach = row.size if window is None or row.packed else window - 1
    first = row.parts[0]
    blocks: list[Block] = []
    start = 0
    for index, size in enumerate((*row.parts, row.size - sum(row.parts))):
        number = -(-size // block)
        for turn in range(number):
            low, high = size * turn // number, size * (turn + 1) // number
            first_key = max(low - reach, 0)
            keys = [(start + first_key, start + high)] if row.in_order else [(0, row.size)]
            # For a part that continues the first, the first part's last slot is at distance 1 of its own first slot.
            before = max(first + low - reach, 0)
            if row.in_order and 0 < index < len(row.parts) and before < first:
                keys.insert(0, (before, first))
            if len(keys) == 2 and keys[0][1] == keys[1][0]:
                keys = [(keys[0][0], keys[1][1])]
            blocks.append(Block((start + low, start + high), tuple(keys)))
        start += size
    return tuple(blocks)
