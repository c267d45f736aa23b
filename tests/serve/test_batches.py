"""Which rows are sampled together, and what they are told."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import pytest

from nnxdsl.errors import RunError
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.sampler import Piece
from nnxdsl.generate.sampling import Sampling
from nnxdsl.serve.batches import Batches, PauseMode, Row, numbers_of


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
    batches, numbers = Batches(), numbers_of(3, [97, 32], 1)[0]

    def sampled(tokens: int, at_first: PauseMode | None = None) -> queue.Queue[Any]:
        """The pieces of a row, the first of which pauses the batches, in their own thread, if that is asked for."""
        pieces, pauses = queue.Queue[Any](), list[PauseMode]() if at_first is None else [at_first]

        def deliver(piece: Any) -> None:
            pieces.put(piece)
            while pauses:
                batches.pause(pauses.pop())

        assert batches.submit([Row(model, [97, 32], Sampling(tokens, temperature=1.0), numbers, deliver)])
        return pieces

    def ids(pieces: queue.Queue[Any], until_done: bool = True) -> list[int]:
        actual = list[int]()
        while True:
            piece = pieces.get()
            assert isinstance(piece, Piece), piece
            actual += piece.ids
            if piece.is_done or not until_done:
                return actual

    expected = ids(sampled(60))
    kept = sampled(60, at_first="keep")
    first = ids(kept, until_done=False)
    later = sampled(2)  # waits
    time.sleep(0.3)
    assert (batches.is_paused, kept.empty(), later.empty()) == (True, True, True)
    batches.resume()
    assert [*first, *ids(kept)] == expected
    assert ids(later) == expected[:2]
    assert not batches.is_paused

    whole = sampled(60)
    first = ids(whole, until_done=False)
    batches.pause("wait")
    assert [*first, *ids(whole)] == expected
    assert whole.empty()
    later = sampled(2)
    batches.pause("abort")
    assert "the server is paused" in str(later.get())
    batches.resume()
    assert ids(sampled(2)) == expected[:2]
    batches.close()


@pytest.mark.extended
def test_a_row_joins_those_that_are_sampled_unless_the_next_in_order_cannot(model: Pretrained) -> None:
    batches, reported = Batches(), queue.Queue[Any]()

    def row(name: str, sampling: Sampling, deliver: Callable[[Any], object] = lambda piece: None) -> Row:
        def report(piece: Any) -> None:
            assert isinstance(piece, Piece), piece
            deliver(piece)
            reported.put((name, piece))

        return Row(model, [97, 32], sampling, numbers_of(1, [97, 32], 1)[0], report)

    short, later = Sampling(9, temperature=1.0), list[Row]()

    def submit_later(piece: Piece) -> None:
        """At the first pieces of the long row: ten that join it, one of another temperature, and one behind that."""
        if later:
            assert batches.submit(later)
            later.clear()

    later += [row(f"joins {number}", short) for number in range(10)]
    later += [row("greedy", Sampling(9)), row("behind", short)]
    batches.submit([row("long", Sampling(64, temperature=1.0), submit_later)])
    ends, ids = list[str](), dict[str, list[int]]()
    while len(ends) < 13:
        name, piece = reported.get()
        ids.setdefault(name, []).extend(piece.ids)
        ends += [name] * piece.is_done
    assert sorted(ends[:10]) == sorted(f"joins {number}" for number in range(10))
    assert ends[10:] == ["long", "greedy", "behind"]
    # Each has the tokens that it has alone.
    assert {tuple(ids[name]) for name in ids if name not in ("long", "greedy")} == {tuple(ids["long"][:9])}
    assert len(ids["long"]) > 2 * 9  # ended by a stop token
    batches.close()


@pytest.mark.extended
def test_no_row_joins_after_new_weights_were_loaded(model: Pretrained) -> None:
    batches, ends = Batches(), queue.Queue[str]()

    def row(name: str, size: int, deliver: Callable[[], object] = lambda: None) -> Row:
        def report(piece: Any) -> None:
            deliver()
            if piece.is_done:
                ends.put(name)

        return Row(model, [97, 32], Sampling(size), (1, 2), report)

    def reload() -> None:
        if model.leaves is old:
            model.leaves = {**old}
            assert batches.submit([row("new", 1)])

    old = model.leaves
    try:
        assert batches.submit([row("old", 60, reload)])
        assert [ends.get(), ends.get()] == ["old", "new"]
    finally:
        model.leaves = old
        batches.close()
