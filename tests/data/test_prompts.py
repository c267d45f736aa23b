"""Prompts that a policy answers: their ids, the columns beside them, and batches of answers."""

from __future__ import annotations

import numpy as np
import pytest

from nnxdsl import Data, DataError
from nnxdsl.data import BytesTokenizer, Prompts, load

CHAT = [{"role": "user", "content": "Hi"}]


def test_a_row_is_a_prompt_and_its_columns(write, tokens: BytesTokenizer) -> None:
    path = write({"prompt": "Q: ", "answer": "a", "level": 2}, {"prompt": CHAT, "answer": "b"})
    dataset = load(Data.Prompts(path, max_completion_length=5), tokens)
    assert isinstance(dataset, Prompts)
    texts = [tokens.decode(dataset.row(row)["prompt"].tolist(), skip_special=False) for row in (0, 1)]
    assert texts == ["<bos>Q: ", "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"]
    assert list(dataset.columns) == [
        {"prompt": "Q: ", "answer": "a", "level": 2},
        {"prompt": CHAT, "answer": "b"},
    ]


def test_long_prompts_are_cut_on_their_left(write, tokens: BytesTokenizer) -> None:
    dataset = load(Data.Prompts(write({"prompt": "abcdef"}), max_prompt_length=4), tokens)
    assert tokens.decode(dataset.row(0)["prompt"].tolist(), skip_special=False) == "<bos>def"
    assert dataset.report.cut == {"prompt": 1}


def test_rows_that_nothing_can_answer(write, tokens: BytesTokenizer) -> None:
    for row, message in (
        ({"answer": "a"}, "field 'prompt' is missing; this row has: answer; Data.Prompts reads prompt"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 3}, "field 'prompt': expected text or a list of messages"),
        ({"prompt": "a<eos>b"}, "which is a special token of the tokenizer"),
    ):
        with pytest.raises(DataError, match=message):
            load(Data.Prompts(write(row)), tokens)


def test_answers_need_room(write, tokens: BytesTokenizer) -> None:
    with pytest.raises(DataError, match="may have 24 tokens, more than the model's 20 positions"):
        load(Data.Prompts(write({"prompt": "abc"}), max_completion_length=20), tokens, max_position=20)


def test_a_batch_of_answers(write, tokens: BytesTokenizer) -> None:
    dataset = load(Data.Prompts(write({"prompt": "ab"}, {"prompt": "c"}), max_completion_length=4), tokens)
    assert isinstance(dataset, Prompts)
    batch = dataset.rollout_batch([1, 0], [[7, 8], [9, 10, 11, 12]], np.array([0.5, -0.5]), size=3)
    bos, (a, b, c) = tokens.bos_id, tokens.encode("abc")
    assert batch.tokens.shape == (3, 16)
    assert batch.tokens[:2, :7].tolist() == [[bos, c, 7, 8, 0, 0, 0], [bos, a, b, 9, 10, 11, 12]]
    assert batch.length.tolist() == [4, 7, 4]
    assert batch.answer.tolist() == [[7, 8, 0, 0], [9, 10, 11, 12], [7, 8, 0, 0]]
    assert batch.loss_mask.sum(axis=1).tolist() == [2, 4, 2]
    assert batch.weight.tolist() == [1, 1, 0]
    assert batch.advantage.tolist() == [0.5, -0.5, 0.5]
    assert batch.limit.tolist() == [4, 4, 4]
    with pytest.raises(DataError, match="prompts alone are no batch"):
        dataset.batch([0], 1)
