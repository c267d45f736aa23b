"""Bin packing of items of unequal length into rows of one length, without splitting them, and the sizes of batches.

An item is a pair (prompt, chosen and rejected) or a sequence. Rows are grouped in blocks: one for each part of a batch
that a device computes at a time. Targets are padded per block, since their number varies less between blocks than
between rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.integer]
Ints = npt.NDArray[np.int64]
Layout = list[list[list[int]]]
"""The items of each row of each block, in order."""

SIZES = 8
"""Number of sizes chosen from the data; each is compiled once."""

PER_ROW = 4
"""Items of mean length per row. More of them reduce padding, but lengthen the rows of attention without a kernel."""

SPARE = 1.01
"""Room for targets in a block, as a multiple of the mean."""


class Size(NamedTuple):
    """The shape of a packed batch.

    Attributes:
        blocks: Number of blocks.
        rows: Rows of a block.
        length: Slots of a row.
        targets: Room for targets in a block.
        items: Room for items in a block.
    """

    blocks: int
    rows: int
    length: int
    targets: int
    items: int

    @property
    def slots(self) -> int:
        """Slots of all rows."""
        return self.blocks * self.rows * self.length


def quantum(length: float) -> int:
    """The multiple to which lengths near `length` are rounded up: a power of two near length / 32, from 8 to 128."""
    return 2 ** min(max(int(math.log2(max(length, 1) / 32)), 3), 7)


def rounded(length: float) -> int:
    """`length` rounded up to a multiple of its quantum."""
    step = quantum(length)
    return math.ceil(length / step) * step


def fit(tokens: Lengths, targets: Lengths, size: Size) -> Layout | None:
    """The layout of items in a batch of this size, or None if they do not fit.

    Best fit decreasing: the longest item first, each into the row with the least room that fits it. Items that fit
    nowhere go into the row with the most room, and are then exchanged for shorter ones.

    Args:
        tokens: `[items]`, slots of each.
        targets: `[items]`, targets of each.
        size: Of the batch.
    """
    room = [size.length] * (size.blocks * size.rows)
    spare, free = [size.targets] * size.blocks, [size.items] * size.blocks
    row_of = np.zeros(len(tokens), np.int64)
    lengths, target_counts = tokens.tolist(), targets.tolist()
    for item in np.argsort(-tokens, kind="stable").tolist():
        needed, scored = lengths[item], target_counts[item]
        best, least, roomiest = -1, size.length + 1, -1
        for row, left in enumerate(room):
            block = row // size.rows
            if not free[block]:
                continue
            if needed <= left < least and scored <= spare[block]:
                best, least = row, left
            if roomiest < 0 or left > room[roomiest]:
                roomiest = row
        best = roomiest if best < 0 else best
        if best < 0:
            return None
        room[best] -= needed
        spare[best // size.rows] -= scored
        free[best // size.rows] -= 1
        row_of[item] = best
    if min(room) < 0 or min(spare) < 0:
        repair = _Repair(size, tokens, targets, row_of, np.array(room), np.array(spare), np.array(free))
        if not repair.run():
            return None
    layout: Layout = [[[] for _ in range(size.rows)] for _ in range(size.blocks)]
    for item, row in enumerate(row_of.tolist()):
        layout[row // size.rows][row % size.rows].append(item)
    return layout


@attrs.define
class _Repair:
    """Local search that removes overflow of rows and blocks.

    Attributes:
        size: Of the batch.
        tokens: `[items]`.
        targets: `[items]`.
        row_of: `[items]`, row of each over all blocks; changed in place.
        room: `[rows]`, free slots; negative for an overfull row.
        spare: `[blocks]`, free targets, likewise.
        free: `[blocks]`, free items.
    """

    size: Size
    tokens: Lengths
    targets: Lengths
    row_of: Ints
    room: Ints
    spare: Ints
    free: Ints

    def run(self) -> bool:
        """Exchanges items, the best exchange first, until nothing is overfull; False if no exchange helps."""
        while (self.room < 0).any() or (self.spare < 0).any():
            if not self._exchange():
                return False
        return True

    def _exchange(self) -> bool:
        """Exchanges an item of the fullest row or block for one elsewhere, or moves it; False if neither helps."""
        count, per_block = len(self.tokens), self.size.rows
        # After the items, an empty one for each row: an exchange with it is a move.
        tokens, targets = (np.append(x, np.zeros(len(self.room), np.int64)) for x in (self.tokens, self.targets))
        rows = np.append(self.row_of, np.arange(len(self.room)))
        if self.room.min() < 0:
            mine = np.flatnonzero(self.row_of == self.room.argmin())[:, None]  # [M, 1]
        else:
            mine = np.flatnonzero(self.row_of // per_block == self.spare.argmin())[:, None]
        longer, more = tokens[mine] - tokens, targets[mine] - targets  # [M, items + rows]
        own_row, other_rows = rows[mine], rows[None]
        home, away = own_row // per_block, other_rows // per_block
        gain = _overflow_reduction(self.room[own_row], self.room[other_rows], longer)
        gain += np.where(home != away, _overflow_reduction(self.spare[home], self.spare[away], more), 0)
        is_full = (np.arange(len(rows)) >= count) & (home != away) & (self.free[away] == 0)
        gain = np.where((own_row == other_rows) | is_full, 0, gain)
        mover, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[mover, other] <= 0:
            return False
        item, own_row, other_rows = mine[mover, 0], rows[mine[mover, 0]], rows[other]
        for free, moved, source, destination in (
            (self.room, longer[mover, other], own_row, other_rows),
            (self.spare, more[mover, other], own_row // per_block, other_rows // per_block),
            (self.free, int(other >= count), own_row // per_block, other_rows // per_block),
        ):
            free[source] += moved
            free[destination] -= moved
        self.row_of[item] = other_rows
        if other < count:
            self.row_of[other] = own_row
        return True


def _overflow_reduction(free: Ints, other: Ints, moved: Ints) -> Ints:
    """By how much the overflow of two places shrinks when `moved` goes from the first to the second."""
    before = np.maximum(-free, 0) + np.maximum(-other, 0)
    return before - np.maximum(-free - moved, 0) - np.maximum(moved - other, 0)


def places(rows: Lengths, size: Size, layout: Layout) -> Ints:
    """[blocks, items] the row of each item of a block; -1 where there is none."""
    row_of = np.full((size.blocks, size.items), -1, np.int64)
    for block, lines in enumerate(layout):
        items = list(itertools.chain.from_iterable(lines))
        row_of[block, : len(items)] = rows[items]
    return row_of


class Packer:
    """Chooses the smallest of a few sizes for each step; the sizes are chosen from the data.

    Args:
        tokens: Slots of each row of the dataset.
        targets: Targets of each row of the dataset.
        batch_size: Items of a step.
        blocks: Blocks of a batch.
        length: Slots of a row, at least those of the longest item; the number of rows then varies. None fixes the
            number of rows and varies their length.
        sample: The dataset's rows of several steps, `batch_size` each.
    """

    def __init__(
        self,
        tokens: Lengths,
        targets: Lengths,
        *,
        batch_size: int,
        blocks: int,
        length: int | None,
        sample: Iterable[Lengths],
    ) -> None:
        self._tokens, self._targets = tokens, targets
        self._blocks, self._length = blocks, length
        self._items = batch_size if blocks == 1 else min(batch_size, 2 * math.ceil(batch_size / blocks))
        mean, longest, self._max_targets = float(np.mean(tokens)), int(np.max(tokens)), int(np.max(targets))
        self._share = min(1.0, SPARE * float(np.mean(targets)) / mean)
        per_row = max(PER_ROW * mean, longest) if length is None else length
        self._rows = max(1, round(batch_size * mean / per_row / blocks))
        self._step = quantum(batch_size * mean / (self._rows * blocks))
        needed = [next(n for n in itertools.count(1) if self._fit(rows, n) is not None) for rows in sample]
        self._levels = levels(needed, SIZES)

    def pack(self, rows: Lengths) -> tuple[Size, Layout]:
        """The size of a step of at most `batch_size` rows of the dataset, and their layout by index in `rows`."""
        for level in self._ascending():
            if (layout := self._fit(rows, level)) is not None:
                return self.size(level), layout
        raise AssertionError("unreachable: levels are unbounded")

    def size(self, level: int) -> Size:
        """The size of a level; higher levels have longer rows, or more of them."""
        rows, length = (self._rows, level * self._step) if self._length is None else (level, self._length)
        targets = min(rounded(max(self._share * rows * length, self._max_targets)), rows * length)
        return Size(self._blocks, rows, length, targets, self._items)

    def _fit(self, rows: Lengths, level: int) -> Layout | None:
        size, tokens, targets = self.size(level), self._tokens[rows], self._targets[rows]
        too_short = size.length < tokens.max() or size.targets < targets.max()
        if too_short or size.slots < tokens.sum() or size.blocks * size.targets < targets.sum():
            return None
        return fit(tokens, targets, size)

    def _ascending(self) -> Iterator[int]:
        """The chosen levels, then further ones that grow by a sixteenth."""
        yield from self._levels
        level = self._levels[-1]
        while True:
            level += math.ceil(level / 16)
            yield level


def levels(needed: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values, ascending, for which rounding all values up to the next one costs least.

    Args:
        needed: At least one value.
        count: At least 1.
    """
    values, times = np.unique(needed, return_counts=True)
    upto = np.concatenate([[0], np.cumsum(times)])  # number of smaller values; last, of all

    def last(chosen: list[_Chosen], end: int) -> _Chosen:
        """The best levels for the values up to `end` with one level more than `chosen`."""
        top, all_up_to = int(values[end]), int(upto[end + 1])
        after = (chosen[start].after(top, all_up_to - int(upto[start])) for start in range(end + 1))
        return min(after, key=lambda candidate: candidate.cost)

    nothing = _Chosen(0, ())
    chosen = [nothing] + [nothing.after(int(values[end]), int(upto[end + 1])) for end in range(len(values))]
    for _ in range(count - 1):
        chosen = [nothing] + [last(chosen, end) for end in range(len(values))]
    return list(chosen[-1].levels)


class _Chosen(NamedTuple):
    """Levels for the smallest values, and the sum of these values rounded up to their levels."""

    cost: int
    levels: tuple[int, ...]

    def after(self, level: int, times: int) -> _Chosen:
        """With one more level, to which `times` values are rounded up."""
        return _Chosen(self.cost + level * times, (*self.levels, level))
