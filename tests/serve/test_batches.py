"""Which rows are sampled together, and what they are told."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from nnxdsl.errors import RunError
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.sampler import Piece
from nnxdsl.generate.sampling import Sampling
from nnxdsl.serve.batches import Batches, PauseMode, Row, filling, numbers_of


def test_what_fills_a_batch_up_makes_its_numbers_powers_of_two() -> None:
    for prompts in ([[97]], [[97]] * 3, [[97], [98], [99]], [[97]] * 5 + [[98]] * 2 + [[99]]):
        whole = [*prompts, *filling(prompts)]
        for number in (len(whole), len({tuple(prompt) for prompt in whole})):
            assert number & (number - 1) == 0


def test_numbers_of_completions_differ() -> None:
    actual = [numbers_of(seed, [prompt], 9) for seed in range(9) for prompt in range(9)]
    assert len({number for each in actual for number in each}) == 9**3
    assert numbers_of(-(10**30), [1], 1) != numbers_of(10**30, [1], 1)


@pytest.mark.extended
def test_a_cancelled_row_is_decoded_no_further_and_an_error_ends_one_batch(model: Pretrained) -> None:
    batches, reported = Batches(), queue.Queue[Any]()
    rows = [
        Row(
            model,
            [97, 32],
            Sampling(size),
            numbers_of(size, [97, 32], 1)[0],
            lambda piece, size=size: reported.put((size, piece)),
        )
        for size in (20, 200)
    ]

    def cancel(piece: Any) -> None:
        reported.put((200, piece))
        rows[1].is_cancelled = True

    rows[1].deliver = cancel
    batches.submit(rows)
    actual: dict[int, list[Piece]] = {20: [], 200: []}
    while not actual[20] or not actual[20][-1].is_done:
        size, piece = reported.get()
        assert isinstance(piece, Piece)
        actual[size].append(piece)
    assert sum(len(piece.ids) for piece in actual[20]) == 20
    assert len(actual[200]) == 1
    wrong = Row(model, [97], Sampling(5, temperature=1.0, top_k=10**6), (1, 2), lambda piece: reported.put(piece))
    right = Row(model, [97], Sampling(1), (1, 2), lambda piece: reported.put(piece))
    batches.submit([wrong, right])
    assert "top_k=1000000 exceeds the vocabulary size" in str(reported.get())
    assert reported.get().is_done

    longer = [
        Row(model, [97] * size, Sampling(1000 - size), (1, size), lambda piece: reported.put(piece))
        for size in (900, 5)
    ]
    batches.submit(longer)  # together they are longer than the context, and each of them fits
    assert isinstance(reported.get(), Piece)
    batches.close()
    assert any(isinstance(reported.get(), RunError) for _ in range(1000))
    assert not batches.submit(longer)


@pytest.mark.extended
def test_a_pause_keeps_ends_or_waits_for_what_is_sampled(model: Pretrained) -> None:
    batches, reported = Batches(), queue.Queue[Any]()
    numbers = numbers_of(3, [97, 32], 1)[0]

    def sampled(tokens: int, at_first: PauseMode | None = None) -> Row:
        """A row whose first piece pauses the batches, in their own thread, if that is asked for."""
        pauses: list[PauseMode] = [] if at_first is None else [at_first]

        def deliver(piece: Any) -> None:
            reported.put(piece)
            while pauses:
                batches.pause(pauses.pop())

        return Row(model, [97, 32], Sampling(tokens, temperature=1.0), numbers, deliver)

    def ids(until_done: bool = True) -> list[int]:
        actual = list[int]()
        while True:
            piece = reported.get()
            assert isinstance(piece, Piece), piece
            actual += piece.ids
            if piece.is_done or not until_done:
                return actual

    assert batches.submit([sampled(60)])
    expected = ids()
    assert batches.submit([sampled(60, at_first="keep")])
    first = ids(until_done=False)
    assert batches.submit([sampled(2)])  # waits
    time.sleep(0.3)
    assert (batches.is_paused, reported.empty()) == (True, True)
    batches.resume()
    assert [*first, *ids()] == expected
    assert ids() == expected[:2]
    assert not batches.is_paused

    assert batches.submit([sampled(60)])
    first = ids(until_done=False)
    batches.pause("wait")
    assert [*first, *ids()] == expected
    assert reported.empty()
    assert batches.submit([sampled(2)])
    batches.pause("abort")
    assert "the server is paused" in str(reported.get())
    batches.resume()
    assert batches.submit([sampled(2)])
    assert ids() == expected[:2]
    batches.close()
