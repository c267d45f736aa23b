"""Items of unequal length put side by side in rows of one length, none of them split: which size, and which row.

An item is a pair (prompt, chosen and rejected) or a sequence. Rows stand in blocks: one for each share of a batch that
one device computes at one time. Which slots predict which targets is listed for a block as a whole, since the number of
targets differs less from block to block than it does from row to row.
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
"""By block, by row: the items that lie in it, in their order."""

SIZES = 8
"""Sizes that are chosen from the data; each is compiled once."""

PER_ROW = 4
"""Items of mean length in a row. More leave less padding, and attention without a kernel looks at longer rows."""

SPARE = 1.01
"""Targets that a block has room for, as a multiple of the mean."""


class Size(NamedTuple):
    """The shape of a packed batch.

    Attributes:
        blocks: Shares of the batch that are computed apart.
        rows: Of a block.
        length: Slots of a row.
        targets: Of a block, at most.
        items: Of a block, at most.
    """

    blocks: int
    rows: int
    length: int
    targets: int
    items: int

    @property
    def slots(self) -> int:
        """Of all rows together."""
        return self.blocks * self.rows * self.length


def quantum(length: float) -> int:
    """What lengths of about `length` are rounded up to multiples of: a power of two, about a 32nd, from 8 to 128."""
    return 2 ** min(max(int(math.log2(max(length, 1) / 32)), 3), 7)


def rounded(length: float) -> int:
    """`length` rounded up to a multiple of its quantum."""
    step = quantum(length)
    return math.ceil(length / step) * step


def fit(tokens: Lengths, targets: Lengths, size: Size) -> Layout | None:
    """Where items lie in a batch of this size, or None if no place was found for all.

    Best fit decreasing: the longest item first, each into the row that has least room left after it. What finds no room
    goes into the roomiest row, and is then exchanged for something shorter.

    Args:
        tokens: `[items]`, of each.
        targets: `[items]`, of each.
        size: What there is room for.
    """
    room = [size.length] * (size.blocks * size.rows)
    spare, free = [size.targets] * size.blocks, [size.items] * size.blocks
    row_of = np.zeros(len(tokens), np.int64)
    needs, says = tokens.tolist(), targets.tolist()
    for item in np.argsort(-tokens, kind="stable").tolist():
        needed, scored = needs[item], says[item]
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
        state = _Placed(size, tokens, targets, row_of, np.array(room), np.array(spare), np.array(free))
        if not state.repair():
            return None
    layout: Layout = [[[] for _ in range(size.rows)] for _ in range(size.blocks)]
    for item, row in enumerate(row_of.tolist()):
        layout[row // size.rows][row % size.rows].append(item)
    return layout


@attrs.define
class _Placed:
    """Items in rows, some of which may hold too much.

    Attributes:
        size: What there should be room for.
        tokens: `[items]`.
        targets: `[items]`.
        row_of: `[items]`, the row of each, counted over all blocks; changed in place.
        room: `[rows]`, slots that are left; negative where a row holds too much.
        spare: `[blocks]`, targets that are left, likewise.
        free: `[blocks]`, items that there is room for.
    """

    size: Size
    tokens: Lengths
    targets: Lengths
    row_of: Ints
    room: Ints
    spare: Ints
    free: Ints

    def repair(self) -> bool:
        """Exchanges items, what mends most first, until no row and no block holds too much; False if it cannot."""
        while (self.room < 0).any() or (self.spare < 0).any():
            if not self._exchange():
                return False
        return True

    def _exchange(self) -> bool:
        """Exchanges one item of what is fullest for one of another row, or for nothing; False if nothing mends."""
        count, per_block = len(self.tokens), self.size.rows
        # Beyond the items, each row has one of no tokens: what is exchanged for it is moved.
        tokens, targets = (np.append(x, np.zeros(len(self.room), np.int64)) for x in (self.tokens, self.targets))
        where = np.append(self.row_of, np.arange(len(self.room)))
        if self.room.min() < 0:
            mine = np.flatnonzero(self.row_of == self.room.argmin())[:, None]  # [M, 1]
        else:
            mine = np.flatnonzero(self.row_of // per_block == self.spare.argmin())[:, None]
        longer, more = tokens[mine] - tokens, targets[mine] - targets  # [M, items + rows]
        here, there = where[mine], where[None]
        home, away = here // per_block, there // per_block
        mended = _mended(self.room[here], self.room[there], longer)
        mended += np.where(home != away, _mended(self.spare[home], self.spare[away], more), 0)
        is_full = (np.arange(len(where)) >= count) & (home != away) & (self.free[away] == 0)
        mended = np.where((here == there) | is_full, 0, mended)
        mover, other = np.unravel_index(mended.argmax(), mended.shape)
        if mended[mover, other] <= 0:
            return False
        item, here, there = mine[mover, 0], where[mine[mover, 0]], where[other]
        for left, moved, of, to in (
            (self.room, longer[mover, other], here, there),
            (self.spare, more[mover, other], here // per_block, there // per_block),
            (self.free, int(other >= count), here // per_block, there // per_block),
        ):
            left[of] += moved
            left[to] -= moved
        self.row_of[item] = there
        if other < count:
            self.row_of[other] = here
        return True


def _mended(left: Ints, other: Ints, moved: Ints) -> Ints:
    """By how much less is over the room of two places when `moved` goes from the one to the other."""
    before = np.maximum(-left, 0) + np.maximum(-other, 0)
    return before - np.maximum(-left - moved, 0) - np.maximum(moved - other, 0)


def places(rows: Lengths, size: Size, layout: Layout) -> Ints:
    """[blocks, items] which of `rows` is each block's first item, its second and so on; -1 where there is none."""
    found = np.full((size.blocks, size.items), -1, np.int64)
    for block, lines in enumerate(layout):
        items = list(itertools.chain.from_iterable(lines))
        found[block, : len(items)] = rows[items]
    return found


class Packer:
    """Chooses a size for each step, out of a few that are chosen from the data.

    Args:
        tokens: Of each row of a dataset.
        targets: Likewise.
        batch_size: Items of a step.
        blocks: Of a batch.
        length: Slots of a row, not less than the longest item; blocks then have as many rows as a step needs. None
            fixes the number of rows, and makes them as long as a step needs.
        sample: Rows of the dataset that make up steps such as will come; each an array of `batch_size`.
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
        mean, self._longest, self._most = float(np.mean(tokens)), int(np.max(tokens)), int(np.max(targets))
        self._share = min(1.0, SPARE * float(np.mean(targets)) / mean)
        per_row = max(PER_ROW * mean, self._longest) if length is None else length
        self._rows = max(1, round(batch_size * mean / per_row / blocks))
        self._step = quantum(batch_size * mean / (self._rows * blocks))
        needed = [next(n for n in itertools.count(1) if self._fit(rows, n) is not None) for rows in sample]
        self._levels = levels(needed, SIZES)

    def pack(self, rows: Lengths) -> tuple[Size, Layout]:
        """The size of the step that consists of these rows of the dataset, and where each lies, by its place in `rows`.

        Args:
            rows: At most `batch_size`.
        """
        for level in self._ascending():
            if (layout := self._fit(rows, level)) is not None:
                return self.size(level), layout
        raise AssertionError("levels do not end")

    def size(self, level: int) -> Size:
        """The size at a level: longer rows, or more of them."""
        rows, length = (self._rows, level * self._step) if self._length is None else (level, self._length)
        targets = min(rounded(max(self._share * rows * length, self._most)), rows * length)
        return Size(self._blocks, rows, length, targets, self._items)

    def _fit(self, rows: Lengths, level: int) -> Layout | None:
        size, tokens, targets = self.size(level), self._tokens[rows], self._targets[rows]
        too_short = size.length < tokens.max() or size.targets < targets.max()
        if too_short or size.slots < tokens.sum() or size.blocks * size.targets < targets.sum():
            return None
        return fit(tokens, targets, size)

    def _ascending(self) -> Iterator[int]:
        """The chosen levels, and for steps beyond them further ones, each a sixteenth higher."""
        yield from self._levels
        level = self._levels[-1]
        while True:
            level += math.ceil(level / 16)
            yield level


def levels(needed: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values, ascending, the largest among them: raising each value to one costs least in all.

    Args:
        needed: Values, at least one.
        count: At least 1.
    """
    values, times = np.unique(needed, return_counts=True)
    upto = np.concatenate([[0], np.cumsum(times)])  # how many are smaller than each value; at last, all

    def last(chosen: list[_Chosen], end: int) -> _Chosen:
        """The best levels for the values up to `end`, which is the last of them, after those chosen for fewer."""
        top, all_up_to = int(values[end]), int(upto[end + 1])
        after = (chosen[start].after(top, all_up_to - int(upto[start])) for start in range(end + 1))
        return min(after, key=lambda found: found.cost)

    nothing = _Chosen(0, ())
    chosen = [nothing] + [nothing.after(int(values[end]), int(upto[end + 1])) for end in range(len(values))]
    for _ in range(count - 1):
        chosen = [nothing] + [last(chosen, end) for end in range(len(values))]
    return list(chosen[-1].levels)


class _Chosen(NamedTuple):
    """Levels for the smaller ones of all values, and what these add up to, each raised to its level."""

    cost: int
    levels: tuple[int, ...]

    def after(self, level: int, times: int) -> _Chosen:
        """With one more level, to which so many values are raised."""
        return _Chosen(self.cost + level * times, (*self.levels, level))
