"""What is known of a row of slots before any token stands in it: which slots can never see which; no arrays of jax."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import attrs
import jax
import numpy as np

Kernel = Literal["dense", "chunked", "cudnn", "splash"]
"""What computes attention: one product over all slots; blocks of queries, each with the keys that it may see; the fused
kernels of cuDNN for GPUs and of Pallas for TPUs."""

QUERIES = 128
"""Queries of a block on a CPU: their scores stay in its cache, and their products are still large."""

Range = tuple[int, int]
"""First slot, and the slot after the last."""


class Block(NamedTuple):
    """Queries that are computed together.

    Attributes:
        queries: their slots.
        keys: all slots that any of them may see, in ascending order.
    """

    queries: Range
    keys: tuple[Range, ...]


@attrs.frozen
class RowLayout:
    """How a row is laid out, whatever its tokens: a part that the others see, and parts that follow it.

    Where a row is not packed, its first part is filled up to its last slot if others follow, and all others from their
    first slot on. The distance of two tokens is then that of their slots, each part counted from the first part's end,
    however long the parts are.

    Attributes:
        parts: slots of the first part, then of each part that follows it, side by side in the row.
        size: all slots of a row; those after the parts are never used.
        packed: several sequences stand in the row, one after another: only their order is known.
    """

    parts: tuple[int, ...]
    size: int
    packed: bool = False

    def __attrs_post_init__(self) -> None:
        if not 0 < sum(self.parts) <= self.size or min(self.parts) < 0:
            raise ValueError(f"parts of {self.parts} slots do not fit a row of {self.size}")
        if self.packed and len(self.parts) > 1:
            raise ValueError("a packed row is one part: of its sequences nothing is known but their order")

    def filled(self, size: int) -> RowLayout:
        """The same row with unused slots behind it, `size` in all."""
        return attrs.evolve(self, size=size)

    def blocks(self, window: int | None, block: int) -> tuple[Block, ...]:
        """All slots in blocks of queries of up to `block` slots, with the keys of each.

        Args:
            window: a token sees itself and the `window - 1` positions before it; None for everything before it.
            block: slots of a block; blocks of one part are of nearly equal size.
        """
        return _blocks(self, window, block)

    def sees(self, window: int | None) -> np.ndarray:
        """`[size, size]` bool: which slot (first axis) may see which; a superset of what real tokens see."""
        seen = np.zeros((self.size, self.size), bool)
        for block in self.blocks(window, 1):
            for start, stop in block.keys:
                seen[block.queries[0], start:stop] = True
        return seen


def pair(prompt: int, response: int) -> RowLayout:
    """`[prompt | chosen | rejected]`."""
    return RowLayout((prompt, response, response), prompt + 2 * response)


def sequence(size: int) -> RowLayout:
    """One sequence from the first slot on."""
    return RowLayout((size,), size)


def packed(size: int) -> RowLayout:
    """Sequences one after another, in any number, of any lengths."""
    return RowLayout((size,), size, packed=True)


@jax.tree_util.register_static
@attrs.frozen
class AttentionMethod:
    """How layers of one kind compute attention. A static node of jax's trees: it is part of the trace, not of its data.

    Attributes:
        kernel: what computes it.
        row: how the row is laid out; None if nothing is known of it, as in a cache.
        window: of these layers; None if they are global.
        queries: of a block, where the kernel takes queries in blocks.
    """

    kernel: Kernel = "dense"
    row: RowLayout | None = None
    window: int | None = None
    queries: int = QUERIES


@lru_cache(maxsize=256)
def _blocks(row: RowLayout, window: int | None, block: int) -> tuple[Block, ...]:
    reach = row.size if window is None or row.packed else window - 1
    first = row.parts[0]
    found: list[Block] = []
    start = 0
    for index, size in enumerate((*row.parts, row.size - sum(row.parts))):
        number = -(-size // block)
        for turn in range(number):
            low, high = size * turn // number, size * (turn + 1) // number
            own = max(low - reach, 0)
            keys = [(start + own, start + high)]
            # Seen from a part that follows, the first part's last slot is one behind its own first slot.
            before = max(first + low - reach, 0)
            if 0 < index < len(row.parts) and before < first:
                keys.insert(0, (before, first))
            if len(keys) == 2 and keys[0][1] == keys[1][0]:
                keys = [(keys[0][0], keys[1][1])]
            found.append(Block((start + low, start + high), tuple(keys)))
        start += size
    return tuple(found)
