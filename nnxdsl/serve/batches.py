"""Batches of rows from many requests: those that wait together are sampled together, by one thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import attrs
import numpy as np

from nnxdsl.errors import RunError
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.sampler import Piece
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.slots import padded_turn, power_of_two

Settings = tuple[int, float, int | None, float | None, float | None]
"""What rows of a batch have in common: the model, and temperature, top-k, top-p and min-p of a draw."""

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
        return id(self.model), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def numbers_of(seed: int, prompt: Sequence[int], choices: int) -> list[tuple[int, int]]:
    """Two 32-bit numbers of each completion: draws depend on these, the prompt and the weights, and on no other row."""
    digest = hashlib.sha256(np.asarray(prompt, "<i8").tobytes()).hexdigest()
    each = (hashlib.sha256(f"nnxdsl serve 1: {seed} {choice} {digest}".encode()).digest() for choice in range(choices))
    return [(int.from_bytes(one[:4], "little"), int.from_bytes(one[4:8], "little")) for one in each]


class Batches:
    """Samples rows in the order in which they came, all that wait and have model and settings in common at a time."""

    def __init__(self) -> None:
        self._waiting, self._running = list[Row](), list[Row]()
        self._paused: PauseMode | None = None
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="nnxdsl serve", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> bool:
        """Adds rows; returns False, and adds none, if too many would wait."""
        with self._changed:
            self._waiting = [row for row in self._waiting if not row.is_cancelled]
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
                rows, self._waiting = [*self._running, *self._waiting], []
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
                _fail(rows, error)
            with self._changed:
                self._running = []
                self._changed.notify_all()
        _fail(self._waiting, RunError("the server ends"))

    def _take(self) -> list[Row]:
        """The rows of the next batch, once there are any; empty at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: (self._waiting and not self.is_paused) or self._is_closed)
                if self._is_closed:
                    return []
                self._waiting = [row for row in self._waiting if not row.is_cancelled]
                if self._waiting:
                    first = self._waiting[0].settings
                    rows = [row for row in self._waiting if row.settings == first][:MOST_ROWS]
                    taken = set(map(id, rows))
                    self._waiting = [row for row in self._waiting if id(row) not in taken]
                    self._running = rows
                    return rows

    def _sample(self, rows: Sequence[Row]) -> None:
        limits = [row.sampling.max_new_tokens for row in rows]
        fillers = filling([row.prompt for row in rows])
        model = rows[0].model
        pieces = model.sampler.pieces(
            model.leaves,
            [*(row.prompt for row in rows), *fillers],
            attrs.evolve(rows[0].sampling, max_new_tokens=power_of_two(max(limits)), seed=0),
            prompt_length=padded_turn(max(len(row.prompt) for row in rows)),
            limits=[*limits, *[1] * len(fillers)],
            numbers=np.array([*(row.numbers for row in rows), *[(0, 0)] * len(fillers)], np.uint32),
            is_unwanted=lambda index: index < len(rows) and rows[index].is_cancelled,
        )
        for completed in pieces:
            for piece in completed:
                if piece.row < len(rows) and not rows[piece.row].is_cancelled:
                    rows[piece.row].deliver(piece)
            with self._changed:
                self._changed.wait_for(lambda: self._paused != "keep" or self._is_closed)
            if self._is_closed:
                _fail(rows, RunError("the server ends"))
                return


def filling(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts that make the numbers of rows and of different prompts powers of two, each of which is compiled once.

    Their rows end with the first token, and nobody reads them.
    """
    count = len({tuple(prompt) for prompt in prompts})
    different = [[0, index] for index in range(power_of_two(count) - count)]
    rows = len(prompts) + len(different)
    return different + [[*(different[-1] if different else prompts[-1])]] * (power_of_two(rows) - rows)


def _fail(rows: Sequence[Row], error: Exception) -> None:
    for row in rows:
        row.deliver(error)
