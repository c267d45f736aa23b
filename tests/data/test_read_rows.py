"""A process reads its own rows of a batch alone, and its part equals that of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnxdsl import Batching, Order
from nnxdsl.config.batching import Batching as BatchingSpec
from nnxdsl.data import BatchSampler, Dataset, Pairs, Sequences
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.ragged import Ragged
from nnxdsl.program.batches import kind_of

ROWS, BLOCKS = 40, 4


class RecordingRagged(Ragged):
    """Rows that write down which of them are read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.read: set[int] = set()

    def __getitem__(self, row: int) -> Any:
        self.read.add(int(row))
        return super().__getitem__(row)


def ragged(rows: list[np.ndarray]) -> RecordingRagged:
    lengths = np.array([len(row) for row in rows], np.int32)
    return RecordingRagged(np.concatenate(rows).astype(np.int32), lengths)


def dataset(kind: type[Dataset]) -> Dataset:
    draw = np.random.default_rng(3)

    def lines(least: int, most: int) -> list[np.ndarray]:
        return [draw.integers(5, 99, draw.integers(least, most)) for _ in range(ROWS)]

    if kind is Pairs:
        parts = {name: ragged(lines(2, 30)) for name in ("prompt", "chosen", "rejected")}
    else:
        tokens = lines(4, 60)
        marks = [np.r_[0, 1, draw.integers(0, 2, len(row) - 2)] for row in tokens]
        parts = {"tokens": ragged(tokens), "target": ragged(marks)}
    report = Report(source="rows.jsonl", rows=ROWS, accepted=ROWS, cut={}, dropped={}, odd={}, first={}, lengths={})
    return kind(TokenizedRows(dict(parts), [f"rows.jsonl:{n}" for n in range(ROWS)], report, "digest", is_chat=False))


@pytest.mark.parametrize("batching", [Batching.Padded(), Batching.Bucketed(buckets=3), Batching.Packed()])
@pytest.mark.parametrize("kind", [Pairs, Sequences])
@pytest.mark.parametrize("part", [0, 1])
def test_half_of_a_batch(kind: type[Dataset], batching: BatchingSpec, part: int) -> None:
    whole, partly = (
        BatchSampler(dataset(kind), batch_size=8, seed=1, order=Order.Shuffled(), batching=batching, blocks=BLOCKS)
        for _ in range(2)
    )
    if isinstance(whole.dataset, Sequences) and isinstance(partly.dataset, Sequences):
        targets, draw = int(whole.dataset.target_ends[-1]), np.random.default_rng(0)
        top = draw.integers(0, 99, (targets, 2), np.int32), draw.random((targets, 3), np.float32)
        whole, partly = (
            side.over(data.with_teacher_top_k(*top))
            for side, data in ((whole, whole.dataset), (partly, partly.dataset))
        )
    for step in (0, 3):
        places = whole.places(step)
        half = slice(part * len(places) // 2, (part + 1) * len(places) // 2)
        mine = {int(row) for row in places[half].ravel() if row >= 0}
        assert 0 < len(mine) < 8
        for ids in partly.dataset._parts.values():
            ids.read.clear()
        batch, expected = partly.batch_at(step, lambda actual: actual[half].ravel()), whole.batch_at(step)  # noqa: B023
        for ids in partly.dataset._parts.values():
            assert ids.read == mine
        for name, value, right in zip(batch._fields, batch, expected, strict=True):
            if right is not None:
                assert value.shape == right.shape, name
                np.testing.assert_array_equal(value[half], right[half], err_msg=name)
        np.testing.assert_array_equal(batch.weight, expected.weight)
        mine_of, all_of = (kind_of(one).lengths(one) for one in (batch, expected))
        assert (mine_of.tokens, mine_of.targets) == (all_of.tokens, all_of.targets), "so that FLOPs are counted right"
        assert mine_of.attended_pairs(None) == all_of.attended_pairs(None)


def test_the_last_batch_of_an_evaluation_is_filled_up() -> None:
    whole, partly = dataset(Pairs), dataset(Pairs)
    rows = np.array([3, 9, 27, 8, 1])
    batch, expected = partly.read_batch(rows, 8, lambda actual: actual[4:]), whole.batch(rows, 8)
    for name, value, right in zip(batch._fields, batch, expected, strict=True):
        if right is not None:
            np.testing.assert_array_equal(value[4:], right[4:], err_msg=name)
    assert partly._parts["prompt"].read == {1, 3}, "row 3 fills up the batch"
