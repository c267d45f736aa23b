"""The train/test split: decided by content, disjoint, equal prompts on one side."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from nnxdsl import Data, DataError
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.loaders.build import load
from nnxdsl.data.split import train_test_split
from nnxdsl.data.tokenizers.base import BytesTokenizer


def loaded(path: Path, numbers: list[int], kind: str = "text") -> Dataset:
    """Rows that tell their numbers; of pairs two have each prompt."""
    rows = [
        {"text": f"row {n}"}
        if kind == "text"
        else {"prompt": f"question {n // 2}", "chosen": f"yes {n}", "rejected": f"no {n}", "number": n}
        for n in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "text": Data.Text(str(path), max_length=64),
        "pairs": Data.Preferences(str(path), max_prompt_length=32, max_completion_length=16),
        "prompts": Data.Prompts(str(path), max_prompt_length=32, max_completion_length=16),
    }[kind]
    return load(data, BytesTokenizer(), loss_on="all")


def texts(dataset: Dataset, part: str) -> list[str]:
    """A part of every row as text."""
    return [BytesTokenizer().decode(dataset.row(row)[part]) for row in range(len(dataset))]


def test_a_row_stays_on_its_side(tmp_path: Path) -> None:
    small, many = loaded(tmp_path / "a.jsonl", list(range(300))), loaded(tmp_path / "b.jsonl", list(range(599, -1, -1)))
    (train, test), (longer_train, longer_test) = train_test_split(small, 0.1), train_test_split(many, 0.1)
    sides = [texts(side, "tokens") for side in (train, test, longer_train, longer_test)]
    assert sorted([*sides[0], *sides[1]]) == sorted(texts(small, "tokens"))
    assert not set(sides[2]) & set(sides[3])
    assert set(sides[0]) < set(sides[2])
    assert set(sides[1]) < set(sides[3])
    assert 15 <= len(test) <= 45
    assert 40 <= len(longer_test) <= 80
    assert set(texts(train_test_split(small, 0.3)[1], "tokens")) > set(sides[1])


def test_equal_prompts_are_on_one_side(tmp_path: Path) -> None:
    train, test = train_test_split(loaded(tmp_path / "a.jsonl", list(range(100)), "pairs"), 0.3)
    assert not set(texts(train, "prompt")) & set(texts(test, "prompt"))
    assert len(test) % 2 == 0


def test_selected_rows_make_the_batches_of_the_whole(tmp_path: Path) -> None:
    whole = loaded(tmp_path / "a.jsonl", list(range(95, 110)))
    rows = np.array([9, 2, 11])
    some = whole.select(rows)
    for ours, expected in zip(some.batch([0, 1, 2], 4), whole.batch(rows, 4), strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert list(some.row_ids) == [whole.row_ids[row] for row in rows]
    assert (some.report.accepted, some.report.lengths["tokens"].total) == (3, sum(map(len, texts(some, "tokens"))) + 6)
    assert [ours.tolist() for ours in some.packing_lengths()] == [
        ours[rows].tolist() for ours in whole.packing_lengths()
    ]
    again = loaded(tmp_path / "b.jsonl", [104, 97, 106])
    assert some.ids_digest() == again.ids_digest() != whole.ids_digest()


def test_names_of_selected_rows_are_made_when_they_are_read(tmp_path: Path) -> None:
    whole, rows = loaded(tmp_path / "a.jsonl", list(range(2000))), np.arange(0, 2000, 2)
    tracemalloc.start()
    some = whole.select(rows)
    assert tracemalloc.get_traced_memory()[1] < 60_000  # 8 bytes a row and part, not a text
    tracemalloc.stop()
    assert some.row_ids[-1] == whole.row_ids[1998]
    assert list(some.row_ids[:3]) == [whole.row_ids[row] for row in (0, 2, 4)]


def test_columns_of_prompts_go_with_their_rows(tmp_path: Path) -> None:
    _, test = train_test_split(loaded(tmp_path / "a.jsonl", list(range(60)), "prompts"), 0.3)
    numbers = [column["number"] for column in test.columns]  # type: ignore[attr-defined]
    assert [f"question {number // 2}" for number in numbers] == [
        text.split("user\n")[-1].split("<")[0] or text for text in texts(test, "prompt")
    ]


def test_a_side_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test_size=0.1 holds out 0 of 1 rows.*or give evaluation.data"):
        train_test_split(loaded(tmp_path / "a.jsonl", [1]), 0.1)
