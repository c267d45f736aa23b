"""Batches of rows from many requests: those that wait together are sampled together, by one thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

import attrs
import numpy as np

from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.sampler import Piece
from nnxdsl.generate.sampling import Sampling

Settings = tuple[float, int | None, float | None, float | None]
"""Of a draw: temperature, top-k, top-p, min-p. Rows of a batch have them in common."""

MOST_ROWS = 256
"""Most rows of a batch."""


@attrs.define(eq=False)
class Row:
    """A completion that is asked for.

    Attributes:
        prompt: Token ids.
        sampling: Its settings; `max_new_tokens` is its own, and `seed` is not read.
        numbers: RNG stream numbers, from `numbers_of`.
        deliver: Is called by the batches' thread with each piece of the completion, or with the error that ended it.
        is_cancelled: Whether nothing waits for it any longer.
    """

    prompt: Sequence[int]
    sampling: Sampling
    numbers: tuple[int, int]
    deliver: Callable[[Piece | Exception], None]
    is_cancelled: bool = False

    @property
    def settings(self) -> Settings:
        """What a row of the same batch has in common with it."""
        own = self.sampling
        return own.temperature, own.top_k, own.top_p, own.min_p


def numbers_of(seed: int, prompt: Sequence[int], choice: int) -> tuple[int, int]:
    """Two 32-bit numbers of a completion: draws depend on these, the prompt and the weights, and on no other row."""
    digest = hashlib.sha256(f"nnxdsl serve 1: {seed} {choice} {list(prompt)}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


class Batches:
    """Samples rows in the order in which they came, all that wait and fit into one batch at a time.

    Args:
        model: The model.
    """

    def __init__(self, model: Pretrained) -> None:
        self._model, self._waiting = model, list[Row]()
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="nnxdsl serve", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> None:
        """Adds rows."""
        with self._changed:
            self._waiting += rows
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after the batch that it samples."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while rows := self._take():
            try:
                self._sample(rows)
            except Exception as error:  # of one batch: the server goes on
                for row in rows:
                    row.deliver(error)

    def _take(self) -> list[Row]:
        """The rows of the next batch, once there are any; empty at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return []
                self._waiting = [row for row in self._waiting if not row.is_cancelled]
                if rows := fitting(self._waiting, self._model.config.max_length):
                    taken = set(map(id, rows))
                    self._waiting = [row for row in self._waiting if id(row) not in taken]
                    return rows

    def _sample(self, rows: Sequence[Row]) -> None:
        # Powers of two are compiled once: rows that fill it up end with their first token, and nobody reads them.
        fill = (1 << (len(rows) - 1).bit_length()) - len(rows)
        limits = [row.sampling.max_new_tokens for row in rows]
        longest = max(len(row.prompt) for row in rows)
        most = min(1 << (max(limits) - 1).bit_length(), self._model.config.max_length - longest)
        sampling = attrs.evolve(rows[0].sampling, max_new_tokens=most, seed=0)
        pieces = self._model.sampler.pieces(
            self._model.leaves,
            [*(row.prompt for row in rows), *[[0]] * fill],
            sampling,
            limits=[*limits, *[1] * fill],
            numbers=np.array([*(row.numbers for row in rows), *[(0, 0)] * fill], np.uint32),
            is_unwanted=lambda index: index < len(rows) and rows[index].is_cancelled,
        )
        for found in pieces:
            for piece in found:
                if piece.row < len(rows) and not rows[piece.row].is_cancelled:
                    rows[piece.row].deliver(piece)


def fitting(waiting: Sequence[Row], max_length: int) -> list[Row]:
    """The first row, and those after it that have its settings and fit into the positions with all before them."""
    found, prompt, new = list[Row](), 0, 0
    for row in waiting:
        longest, most = max(prompt, len(row.prompt)), max(new, row.sampling.max_new_tokens)
        if found and (row.settings != found[0].settings or longest + most > max_length):
            continue
        found.append(row)
        prompt, new = longest, most
        if len(found) == MOST_ROWS:
            break
    return found
