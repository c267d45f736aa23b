"""Batches of rows from many requests: those that wait together are sampled together, and later ones join them."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import attrs
import numpy as np

from nnxdsl.errors import RunError
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.row_queue import NewRow
from nnxdsl.generate.sampler import Piece
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.slots import padded_turn, power_of_two

Settings = tuple[int, float, int | None, float | None, float | None]
"""What rows of a batch have in common: the weights, and temperature, top-k, top-p and min-p of a draw."""

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of rows that have begun, as in vLLM: they end with an error, are finished, or go on after the pause."""

MOST_ROWS = 256
"""Most rows of a batch."""
MOST_WAITING = 4096
"""Most rows that wait."""


@attrs.define(eq=False)
class Row:
    """A completion that is asked for.

    Attributes:
        model: Samples it.
        prompt: Token ids.
        sampling: Its settings; `max_new_tokens` is its own, and `seed` is not read.
        numbers: RNG stream numbers, from `numbers_of`.
        deliver: Is called by the batches' thread with each piece of the completion, or with the error that ended it.
        is_cancelled: Whether nothing waits for it any longer.
    """

    model: Pretrained
    prompt: Sequence[int]
    sampling: Sampling
    numbers: tuple[int, int]
    deliver: Callable[[Piece | Exception], None]
    is_cancelled: bool = False

    @property
    def settings(self) -> Settings:
        """What a row of the same batch has in common with it."""
        sampling = self.sampling
        return id(self.model.leaves), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def numbers_of(seed: int, prompt: Sequence[int], choices: int) -> list[tuple[int, int]]:
    """Two 32-bit numbers of each completion: draws depend on these, the prompt and the weights, and on no other row."""
    digest = hashlib.sha256(np.asarray(prompt, "<i8").tobytes()).hexdigest()
    each = (hashlib.sha256(f"nnxdsl serve 1: {seed} {choice} {digest}".encode()).digest() for choice in range(choices))
    return [(int.from_bytes(one[:4], "little"), int.from_bytes(one[4:8], "little")) for one in each]


class Batches:
    """Samples rows in the order in which they came, in one thread.

    Rows of one model with the same settings are sampled together. A row joins those that are sampled if it is the next
    in the order, has their model and settings, and is not longer than they may be.
    """

    def __init__(self) -> None:
        self._waiting, self._running = deque[Row](), dict[int, Row]()
        self._paused: PauseMode | None = None
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="nnxdsl serve", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> bool:
        """Adds rows; returns False, and adds none, if too many would wait."""
        with self._changed:
            self._forget_cancelled()
            if self._is_closed or len(self._waiting) + len(rows) > MOST_WAITING:
                return False
            self._waiting += rows
            self._changed.notify_all()
            return True

    @property
    def is_paused(self) -> bool:
        """Whether new rows wait for `resume`."""
        return self._paused is not None

    def pause(self, mode: PauseMode) -> None:
        """Begins no batch until `resume`; with "abort" and "wait", returns once the one that is sampled has ended."""
        rows = list[Row]()
        with self._changed:
            self._paused = mode
            if mode == "abort":
                rows, self._waiting = [*self._running.values(), *self._waiting], deque()
                rows = [row for row in rows if not row.is_cancelled]
                for row in rows:
                    row.is_cancelled = True
            self._changed.notify_all()
        _fail(rows, RunError("the server is paused; ask again later"))
        with self._changed:
            self._changed.wait_for(lambda: mode == "keep" or not self._running or self._is_closed)

    def resume(self) -> None:
        """Goes on after `pause`."""
        with self._changed:
            self._paused = None
            self._changed.notify_all()

    def close(self) -> None:
        """Ends what is sampled, and the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()  # a process that ends while XLA runs in a thread aborts

    def _run(self) -> None:
        while rows := self._take():
            try:
                self._sample(rows)
            except Exception as error:  # of one batch: the server goes on
                _fail(self._running.values(), error)
            with self._changed:
                self._running = {}
                self._changed.notify_all()
        _fail(self._waiting, RunError("the server ends"))

    def _take(self) -> list[Row]:
        """The rows of the next batch, once there are any; empty at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: (self._waiting and not self.is_paused) or self._is_closed)
                if self._is_closed:
                    return []
                self._forget_cancelled()
                if self._waiting:
                    first = self._waiting[0].settings
                    rows = [row for row in self._waiting if row.settings == first][:MOST_ROWS]
                    taken = set(map(id, rows))
                    self._waiting = deque(row for row in self._waiting if id(row) not in taken)
                    self._running = dict(enumerate(rows))
                    return rows

    def _forget_cancelled(self) -> None:
        self._waiting = deque(row for row in self._waiting if not row.is_cancelled)

    def _sample(self, rows: Sequence[Row]) -> None:
        model, settings = rows[0].model, rows[0].settings
        leaves, limits = model.leaves, [row.sampling.max_new_tokens for row in rows]
        most, numbers, running = power_of_two(max(limits)), itertools.count(len(rows)), self._running

        def join(longest: int) -> list[NewRow]:
            joined = list[Row]()
            with self._changed:
                self._forget_cancelled()
                while self._paused is None and self._waiting and len(running) < MOST_ROWS:
                    row = self._waiting[0]
                    is_short = len(row.prompt) <= longest and row.sampling.max_new_tokens <= most
                    if row.settings != settings or not is_short:
                        break
                    running[next(numbers)] = row
                    joined.append(self._waiting.popleft())
            return [NewRow(tuple(row.prompt), row.sampling.max_new_tokens, row.numbers) for row in joined]

        pieces = model.sampler.pieces(
            leaves,
            [row.prompt for row in rows],
            attrs.evolve(rows[0].sampling, max_new_tokens=most, seed=0),
            prompt_length=padded_turn(max(len(row.prompt) for row in rows)),
            limits=limits,
            numbers=np.array([row.numbers for row in rows], np.uint32),
            is_unwanted=lambda number: number not in running,
            join=join,
        )
        for completed in pieces:
            for piece in completed:
                row = running[piece.row]
                if not row.is_cancelled:
                    row.deliver(piece)
                if piece.is_done or row.is_cancelled:
                    with self._changed:
                        del running[piece.row]
            with self._changed:
                self._changed.wait_for(lambda: self._paused != "keep" or self._is_closed)
            if self._is_closed:
                _fail(running.values(), RunError("the server ends"))
                return


def _fail(rows: Iterable[Row], error: Exception) -> None:
    for row in rows:
        row.deliver(error)
