"""The rows in the slots of a batch, and those that wait for one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np

from nnxdsl.generate.decode_loop import Fill
from nnxdsl.models.slots import most_prefixes, power_of_two


class NewRow(NamedTuple):
    """A row that joins those that are decoded.

    Attributes:
        prompt: Token ids.
        limit: Most tokens of the completion, at most `max_new_tokens`.
        numbers: RNG stream numbers `[2]`.
    """

    prompt: tuple[int, ...]
    limit: int
    numbers: Sequence[int]


@attrs.define
class Table:
    """The rows in the slots, and the prefixes that they share.

    Attributes:
        rows: The row of each slot, -1 for none `[B]`.
        length: Tokens of each completion `[M, B]`.
        place: The place of each slot among those of prefixes, `prefix * places + place`, `[B]`.
        left: Rows of each prefix that have not ended, those that wait for a slot included `[U]`.
        places: Most rows of a prefix.
    """

    rows: np.ndarray
    length: np.ndarray
    place: np.ndarray
    left: np.ndarray
    places: int

    @classmethod
    def of(cls, slots: int, places: int, groups: int | None, models: int) -> Table:
        """Empty slots, with prefixes of `places` rows for at most so many groups; None for any number of them."""
        zeros, left = np.zeros(slots, np.int32), np.zeros(most_prefixes(slots, places, groups), np.int64)
        return cls(zeros - 1, np.zeros((models, slots), np.int64), zeros, left, places)

    def grow(self, slots: int) -> None:
        """Adds slots until there are so many, with prefixes for any number of groups."""
        if slots <= len(self.rows):
            return
        models, more = len(self.length), slots - len(self.rows)
        added = Table.of(more, self.places, None, models)
        self.rows, self.place = np.append(self.rows, added.rows), np.append(self.place, added.place)
        self.length = np.append(self.length, added.length, axis=1)
        prefixes = most_prefixes(slots, self.places, None)
        self.left = np.append(self.left, np.zeros(max(prefixes - len(self.left), 0), np.int64))

    @property
    def is_busy(self) -> bool:
        """Whether any slot has a row."""
        return self.busy > 0

    @property
    def busy(self) -> int:
        """Slots that have a row."""
        return int((self.rows >= 0).sum())

    @property
    def members(self) -> np.ndarray:
        """The slots of each prefix, `[U, G]`."""
        members, used = np.zeros(len(self.left) * self.places, np.int32), np.flatnonzero(self.rows >= 0)
        members[self.place[used]] = used
        return members.reshape(-1, self.places)

    def end(self, is_done: np.ndarray) -> None:
        """Frees the slots whose rows have ended, and the prefixes that have no others."""
        ended = is_done & (self.rows >= 0)
        np.subtract.at(self.left, self.place[ended] // self.places, 1)
        self.rows[is_done], self.length[:, is_done], self.place[is_done] = -1, 0, 0

    def shrink(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Keeps so many slots, those with rows first; returns the numbers of the slots and of the prefixes kept."""
        slots = np.argsort(self.rows < 0, kind="stable")[:size].astype(np.int32)
        prefixes = np.argsort(self.left == 0, kind="stable")[:size].astype(np.int32)
        place = np.zeros(len(self.left), np.int32)
        place[prefixes] = np.arange(len(prefixes))
        places = self.place[slots]
        self.rows, self.length, self.left = self.rows[slots], self.length[:, slots], self.left[prefixes]
        self.place = place[places // self.places] * self.places + places % self.places
        return slots, prefixes


@attrs.define
class Queue:
    """Rows to decode, those of equal prompts one after another.

    Attributes:
        length: Tokens of a prompt with its padding.
        group_size: Most rows of a group.
        prompts_at_once: Prompts that are computed at one time.
        joins: Whether rows are added later; then as many prompts are computed as wait, up to a power of two.
        waiting: The groups of rows that are not taken yet, each of one prompt, in their order.
        group: The rows left of the group that was taken last.
        prefix: The prefix of that group.
        computed: The prompts that were computed last, and the number of each among them.
    """

    length: int
    group_size: int
    prompts_at_once: int
    joins: bool
    waiting: deque[deque[tuple[int, NewRow]]] = attrs.field(factory=deque)
    group: deque[tuple[int, NewRow]] = attrs.field(factory=deque)
    prefix: int = 0
    computed: dict[tuple[int, ...], int] = attrs.field(factory=dict)
    _rows: int = 0

    def add(self, rows: Sequence[NewRow]) -> None:
        """Adds rows at the end."""
        by_prompt = defaultdict[tuple[int, ...], list[tuple[int, NewRow]]](list)
        for number, row in enumerate(rows, self._rows):
            by_prompt[row.prompt].append((number, row))
        self._rows += len(rows)
        for each in by_prompt.values():
            self.waiting += (
                deque(each[start : start + self.group_size]) for start in range(0, len(each), self.group_size)
            )

    @property
    def rows_waiting(self) -> int:
        """Rows that have no slot yet."""
        return len(self.group) + sum(map(len, self.waiting))

    def can_fill(self, table: Table) -> bool:
        """Whether a row waits for a slot that is free, and has a prefix or can get one."""
        has_prefix = bool(self.group) or (bool(self.waiting) and bool((table.left == 0).any()))
        return has_prefix and bool((table.rows < 0).any())

    @property
    def needs_prompts(self) -> bool:
        """Whether the prompt of the next group is to be computed."""
        return not self.group and self._next_prompt not in self.computed

    @property
    def _next_prompt(self) -> tuple[int, ...]:
        return self.waiting[0][0][1].prompt

    def take_prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """The next prompts, padded on the left `[U, P]`, and their tokens `[U]`; the last is there again to fill U."""
        different = dict.fromkeys(group[0][1].prompt for group in self.waiting)
        prompts = list(different)[: self.prompts_at_once]
        self.computed = {prompt: number for number, prompt in enumerate(prompts)}
        size = min(power_of_two(len(prompts)), self.prompts_at_once) if self.joins else self.prompts_at_once
        prompts += prompts[-1:] * (size - len(prompts))
        tokens = np.zeros((size, self.length), np.int32)
        for prompt, line in zip(prompts, tokens, strict=True):
            line[self.length - len(prompt) :] = prompt
        return tokens, np.array([len(prompt) for prompt in prompts], np.int32)

    def by_row(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Values `[U, P, ...]` of the tokens of the prompts that were computed last, by row, without padding."""
        return {
            number: values[place, self.length - len(row.prompt) :]
            for group in self.waiting
            for number, row in group
            if (place := self.computed.get(row.prompt)) is not None
        }

    def take(self, table: Table) -> Fill:
        """Takes rows whose prompts are computed for slots that are free."""
        taken, prefixes = list[tuple[int, NewRow]](), list[tuple[int, int]]()
        for slot in np.flatnonzero(table.rows < 0):
            if not self.group:
                free = np.flatnonzero(table.left == 0)
                if not self.waiting or not len(free) or self.needs_prompts:
                    break
                prefixes.append((int(free[0]), self.computed[self._next_prompt]))
                self.group, self.prefix = self.waiting.popleft(), int(free[0])
                table.left[self.prefix] = len(self.group)
            table.place[slot] = (self.prefix + 1) * self.group_size - len(self.group)
            table.rows[slot], row = self.group.popleft()
            taken.append((int(slot), row))
        count, members = len(table.rows), table.members
        prefix, prefix_prompt = _columns(prefixes, len(members), 2)
        fills = [(slot, self.computed[row.prompt], len(row.prompt), row.limit) for slot, row in taken]
        slot, prompt, length, limit = _columns(fills, count, 4)
        numbers = np.zeros((count, 2), np.uint32)
        numbers[: len(taken)] = np.array([row.numbers for _, row in taken], np.uint32).reshape(-1, 2)
        return Fill(
            size=np.int32(len(taken)),
            slot=slot,
            prompt=prompt,
            length=length,
            numbers=numbers,
            limit=limit,
            prefixes=np.int32(len(prefixes)),
            prefix=prefix,
            prefix_prompt=prefix_prompt,
            rows=members,
            place=table.place.copy(),
        )


def _columns(rows: Sequence[tuple[int, ...]], size: int, count: int) -> np.ndarray:
    """Rows of `count` numbers as columns `[count, size]`, int32, filled up with zeros."""
    columns = np.zeros((count, size), np.int32)
    columns[:, : len(rows)] = np.array(rows, np.int32).reshape(-1, count).T
    return columns
