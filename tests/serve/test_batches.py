"""Which rows are sampled together, and what they are told."""

from __future__ import annotations

import queue
from typing import Any

from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.generate.sampler import Piece
from nnxdsl.generate.sampling import Sampling
from nnxdsl.serve.batches import Batches, Row, fitting, numbers_of


def row(prompt: int, new: int, **settings: Any) -> Row:
    """A row whose pieces go nowhere."""
    return Row([97] * prompt, Sampling(new, **settings), numbers_of(1, [97], 0), lambda piece: None)


def test_rows_of_a_batch_have_their_settings_in_common_and_fit_together() -> None:
    first, cold, long, other = (
        row(10, 20, temperature=1.0),
        row(10, 20),
        row(70, 25, temperature=1.0),
        row(5, 30, temperature=1.0),
    )
    assert fitting([first, cold, long, other], 100) == [first, long, other]
    assert fitting([first, cold, long, other], 94) == [first, other]  # each alone would fit
    assert fitting([cold, first], 100) == [cold]
    assert fitting([], 100) == []


def test_numbers_of_completions_differ() -> None:
    all_of_them = {
        numbers_of(seed, [prompt], choice) for seed in range(9) for prompt in range(9) for choice in range(9)
    }
    assert len(all_of_them) == 9**3


def test_a_cancelled_row_is_decoded_no_further_and_an_error_ends_one_batch(model: Pretrained) -> None:
    batches, told = Batches(model), queue.Queue[Any]()
    rows = [
        Row([97, 32], Sampling(size), numbers_of(0, [97, 32], size), lambda piece, size=size: told.put((size, piece)))
        for size in (20, 200)
    ]

    def cancel(piece: Any) -> None:
        told.put((200, piece))
        rows[1].is_cancelled = True

    rows[1].deliver = cancel
    batches.submit(rows)
    found: dict[int, list[Piece]] = {20: [], 200: []}
    while not found[20] or not found[20][-1].is_done:
        size, piece = told.get()
        assert isinstance(piece, Piece)
        found[size].append(piece)
    assert sum(len(piece.ids) for piece in found[20]) == 20
    assert len(found[200]) == 1
    wrong = Row([97], Sampling(5, temperature=1.0, top_k=10**6), (1, 2), lambda piece: told.put(piece))
    right = Row([97], Sampling(1), (1, 2), lambda piece: told.put(piece))
    batches.submit([wrong, right])
    assert "top_k=1000000 exceeds the vocabulary size" in str(told.get())
    assert told.get().is_done
    batches.close()
