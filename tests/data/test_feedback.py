"""Labelled completions: every form of a row, the mismatched completion of each, and refused rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl import BadRows, Data, DataError, Order
from nnxdsl.config.batching import Packed
from nnxdsl.data import BatchSampler, BytesTokenizer, Pairs, load
from nnxdsl.data.batch import token_count

USER = {"role": "user", "content": "Hi"}
GOOD = {"role": "assistant", "content": "Hello"}
CHAT = ("<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "Hello<end_of_turn>")
OTHER = {"prompt": "Other: ", "completion": "else", "label": True}


def answers(write: Any, *rows: dict[str, Any], **fields: Any) -> Pairs:
    result = load(Data.Feedback(write(*rows), **fields), BytesTokenizer())
    assert isinstance(result, Pairs)
    return result


def shown(dataset: Pairs, row: int) -> tuple[str, str, str, bool]:
    decode = BytesTokenizer().decode
    assert dataset.desirable is not None
    texts = (decode(ids.tolist(), skip_special=False) for ids in dataset.row(row).values())
    return (*texts, bool(dataset.desirable[row]))  # type: ignore[return-value]


def refused(write: Any, *rows: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(DataError) as error:
        answers(write, *rows, **fields)
    return str(error.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q: ", "completion": "yes", "label": True}, ("<bos>Q: ", "yes<eos>")),
        ({"prompt": "<bos>Q: ", "completion": "yes<eos>", "label": True}, ("<bos>Q: ", "yes<eos>")),
        ({"prompt": [USER], "completion": [GOOD], "label": True}, CHAT),
        ({"prompt": [USER], "completion": [USER, GOOD], "label": True}, CHAT),
        ({"prompt": "Hi", "completion": [GOOD], "label": True}, CHAT),
        ({"prompt": [USER], "completion": "Hello", "label": True}, CHAT),
        ({"prompt_ids": [5], "completion_ids": [1, 2], "label": True}, ("\x05", "\x01\x02")),
    ],
)
def test_every_form_of_a_row(write: Any, row: dict[str, Any], expected: tuple[str, str]) -> None:
    dataset = answers(write, row, OTHER, {**OTHER, "prompt": "No: ", "label": False})
    assert shown(dataset, 0) == (*expected, "else<eos>", True)
    assert shown(dataset, 1)[2] == expected[1]
    assert shown(dataset, 2) == ("<bos>No: ", "else<eos>", "else<eos>", False)
    assert dataset.row_ids == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]


def test_a_pair_is_two_answers(write: Any) -> None:
    rows = [{"prompt": f"{n}: ", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(3)]
    dataset = answers(write, *rows)
    assert dataset.row_ids == [f"rows.jsonl:{n}" for n in (1, 1, 2, 2, 3, 3)]
    assert [shown(dataset, row) for row in range(4)] == [
        ("<bos>0: ", "good 0<eos>", "good 2<eos>", True),
        ("<bos>0: ", "bad 0<eos>", "bad 2<eos>", False),
        ("<bos>1: ", "good 1<eos>", "good 0<eos>", True),
        ("<bos>1: ", "bad 1<eos>", "bad 0<eos>", False),
    ]
    assert dataset.report.rows == dataset.report.accepted == 3
    assert set(dataset.report.lengths) == {"prompt", "completion", "rejected"}


def test_the_other_answer_is_to_another_prompt(write: Any) -> None:
    rows = [("a", "1", True), ("a", "2", True), ("b", "3", True), ("b", "4", False), ("a", "5", True)]
    dataset = answers(write, *({"prompt": p, "completion": c, "label": label} for p, c, label in rows))
    others = [shown(dataset, row)[2].removesuffix("<eos>") for row in range(5)]
    # Of the same label, the nearest before it; the one answer that is not desirable has only the others.
    assert others == ["3", "3", "2", "2", "3"]
    same = refused(write, *({"prompt": "a", "completion": c, "label": True} for c in "12"))
    assert same == "rows.jsonl: all rows have the same prompt, so no completion can be paired with a mismatched one"


def test_batches_bear_labels_padded_or_packed(write: Any) -> None:
    rows = [{"prompt": f"{n}: ", "completion": "x" * (1 + n), "label": n % 3 == 0} for n in range(7)]
    dataset = answers(write, *rows)
    batch = dataset.batch([3, 1], 3)
    assert batch.desirable.tolist() == [1.0, 0.0, 1.0]
    assert batch.weight.tolist() == [1.0, 1.0, 0.0]
    assert token_count(batch) == (batch.prompt_length + batch.chosen_length)[:2].sum()
    padded, packed = (
        BatchSampler(dataset, batch_size=4, seed=0, order=Order.Shuffled(), **fields)
        for fields in ({}, {"batching": Packed(), "blocks": 2})
    )
    one, other = padded.batch_at(1), packed.batch_at(1)
    assert token_count(one) == token_count(other)
    actual = dict(zip(packed.places(1).ravel().tolist(), other.desirable.ravel().tolist(), strict=True))
    assert [actual[row] for row in padded.indices(1).tolist()] == one.desirable.tolist()
    assert np.all(other.desirable[packed.places(1) < 0] == 0)
    assert dataset.ids_digest() == answers(write, *rows).ids_digest()


def test_what_is_too_long_is_cut(write: Any) -> None:
    row = {"prompt": "abcdef", "completion": "123456", "label": True}
    dataset = answers(write, row, OTHER, max_prompt_length=4, max_completion_length=3)
    assert shown(dataset, 0)[:2] == ("<bos>def", "123")
    assert dataset.report.cut == {"prompt": 2, "completion": 2}


def test_labels_are_read_from_text_and_numbers(tmp_path: Path, tokens: BytesTokenizer) -> None:
    cells = {"true": 1, "False": 0, "1": 1, " 0 ": 0, "TRUE": 1}
    lines = ["prompt,completion,label", *(f"{number},x,{cell}" for number, cell in enumerate(cells))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    dataset = load(Data.Feedback(str(tmp_path / "rows.csv")), tokens)
    assert isinstance(dataset, Pairs)
    assert dataset.desirable is not None
    assert dataset.desirable.tolist() == list(cells.values())
    rows = [{"prompt": str(label), "completion": "x", "label": label} for label in (1, 0, True, False, 1.0)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load(Data.Feedback(str(tmp_path / "rows.jsonl")), tokens)
    assert isinstance(dataset, Pairs)
    assert dataset.desirable is not None
    assert dataset.desirable.tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            "field 'label' is missing; this row has: prompt, completion; Data.Feedback",
        ),
        ({"prompt": "a", "completion": "b", "label": 2}, "field 'label': expected true or false, got"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "field 'label': expected true or false, got 'yes'"),
        ({"prompt": "a", "completion": " ", "label": True}, "the completion is empty"),
        ({"prompt": "", "completion": "a", "label": True}, "the prompt is empty"),
        ({"prompt_ids": [1], "completion_ids": [], "label": True}, "the completion is empty"),
        (
            {"prompt": [USER], "completion": [USER], "label": True},
            "expected messages of the assistant after the prompt",
        ),
        ({"prompt": "a", "completion": "b<eos>c", "label": True}, "contains '<eos>', which is a special token"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
    ],
)
def test_rows_that_cannot_be_learnt_from(write: Any, row: dict[str, Any], message: str) -> None:
    assert message in refused(write, OTHER, row)
    rest = (OTHER, {**OTHER, "prompt": "No: "})
    assert len(answers(write, *rest, row, bad_rows=BadRows.Skip())) == 2
