"""Prompts for online RL: their ids, the columns beside them, and rollout batches."""

from __future__ import annotations

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
    batch = dataset.rollout_batch([1, 0], [[7, 8], [9, 10, 11, 12]], size=3)
    bos, (a, b, c) = tokens.bos_id, tokens.encode("abc")
    assert batch.tokens.shape == (3, 16)
    assert batch.tokens[:2, :7].tolist() == [[bos, c, 7, 8, 0, 0, 0], [bos, a, b, 9, 10, 11, 12]]
    assert batch.length.tolist() == [4, 7, 4]
    assert batch.completion_ids.tolist() == [[7, 8, 0, 0], [9, 10, 11, 12], [7, 8, 0, 0]]
    assert batch.loss_mask.sum(axis=1).tolist() == [2, 4, 2]
    assert batch.weight.tolist() == [1, 1, 0]
    assert batch.advantages.shape == batch.completion_ids.shape
    assert batch.max_completion_length.tolist() == [4, 4, 4]
    with pytest.raises(DataError, match="prompts alone are no batch"):
        dataset.batch([0], 1)


TRIMMED = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "prefill", "expected"),
    [
        (None, "Sure, ", "<start_of_turn>model\nSure, "),
        (TRIMMED, "Sure, ", "<start_of_turn>assistant\nSure,"),
        (TRIMMED, "", "<start_of_turn>assistant\n"),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(write, template: str | None, prefill: str, expected: str) -> None:
    tokens = BytesTokenizer(template)
    chat = [*CHAT, {"role": "assistant", "content": prefill}]
    row = load(Data.Prompts(write({"prompt": chat})), tokens).row(0)
    opening = tokens.decode(row["prompt"].tolist(), skip_special=False)
    assert opening == f"<bos><start_of_turn>user\nHi<end_of_turn>\n{expected}"
    answers = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    pair = load(Data.Preferences(write({"prompt": chat, "chosen": answers[0], "rejected": answers[1]})), tokens).row(0)
    assert tokens.decode(pair["prompt"].tolist(), skip_special=False) == opening
    blank = " " if template and prefill else ""
    assert tokens.decode(pair["chosen"].tolist(), skip_special=False) == f"{blank}yes<end_of_turn>"
    answer = {"prompt": chat, "completion": answers[0], "label": True}
    other = {**answer, "prompt": "Other"}
    single = load(Data.Feedback(write(answer, other)), tokens).row(0)
    assert (single["prompt"].tolist(), single["chosen"].tolist()) == (pair["prompt"].tolist(), pair["chosen"].tolist())
    sft = load(Data.Conversations(write({"prompt": chat, "completion": answers[0]})), tokens).row(0)
    assert sft["tokens"].tolist() == [*pair["prompt"].tolist(), *pair["chosen"].tolist()]
    assert sft["tokens"][sft["target"] == 1].tolist() == pair["chosen"].tolist()


def test_tool_calls_are_not_continued(write, tokens: BytesTokenizer) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    with pytest.raises(DataError, match="ends with tool calls, which cannot be continued; add their results"):
        load(Data.Prompts(write({"prompt": [*CHAT, call]})), tokens)
