"""Rows of widely used datasets, in their real columns: recognised, reported, and equal to rows in our own columns."""

from __future__ import annotations

from typing import Any

import pytest

from nnxdsl import BadRows, Data, DataError, SpecError
from nnxdsl.data import BytesTokenizer, load
from nnxdsl.data.loaders.token_cache import TokenCache

USER, GOOD, BAD = (
    {"role": "user", "content": "Capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "assistant", "content": "Rome"},
)
SYSTEM = {"role": "system", "content": "Be brief."}
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
CALLING = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

ULTRAFEEDBACK = {
    "prompt": "Capital of France?",
    "prompt_id": "0f",
    "chosen": [USER, GOOD],
    "rejected": [USER, BAD],
    "messages": [USER, GOOD],
    "score_chosen": 8.5,
    "score_rejected": 3.0,
}
HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Capital of France?\n\nAssistant: Paris it is",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Capital of France?\n\nAssistant: Paris it was",
}
HH_TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}, USER]
ORCA = {"system": "Be brief.", "question": "Capital of France?", "chosen": "Paris", "rejected": "Rome"}
OPENAI_PAIR = {
    "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
    "preferred_output": [GOOD],
    "non_preferred_output": [BAD],
}
SHAREGPT = {"id": "x_0", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ALPACA = {"instruction": "Translate.", "input": "chat", "output": "cat", "text": "Below is ..."}
SCORES = "prompt_id messages score_chosen score_rejected"
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize(
    ("kind", "row", "ours", "name", "unread"),
    [
        (
            "Preferences",
            ULTRAFEEDBACK,
            PAIR,
            "UltraFeedback-binarized",
            "prompt_id messages score_chosen score_rejected",
        ),
        (
            "Preferences",
            HH,
            {"prompt": HH_TURNS, "chosen": "Paris it is", "rejected": "Paris it was"},
            *("HH-RLHF", ""),
        ),
        ("Preferences", ORCA, {**PAIR, "prompt": [SYSTEM, USER]}, "Orca pairs", ""),
        ("Preferences", {**ORCA, "system": ""}, PAIR, "Orca pairs", ""),
        ("Preferences", OPENAI_PAIR, PAIR, "OpenAI preferences", ""),
        ("Conversations", SHAREGPT, {"messages": CHAT}, "ShareGPT", "id"),
        ("Conversations", {**SHAREGPT, "system": "Be brief."}, {"messages": [SYSTEM, *CHAT]}, "ShareGPT", "id"),
        (
            "Conversations",
            ALPACA,
            {
                "messages": [
                    {"role": "user", "content": "Translate.\n\nchat"},
                    {"role": "assistant", "content": "cat"},
                ]
            },
            *("Alpaca", "text"),
        ),
        (
            "Conversations",
            {"instruction": "Say hello.", "input": "", "output": "hello"},
            {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "hello"}]},
            *("Alpaca", ""),
        ),
        (
            "Conversations",
            {"messages": CHAT, "tools": TOOLS, "parallel_tool_calls": False},
            {"messages": CHAT, "tools": TOOLS},
            *("OpenAI chat with tools", "parallel_tool_calls"),
        ),
    ],
)
def test_rows_in_a_layout_have_the_tokens_of_rows_in_our_columns(
    write, kind: str, row: dict[str, Any], ours: dict[str, Any], name: str, unread: str
) -> None:
    tokens, data = BytesTokenizer(CALLING), getattr(Data, kind)
    actual = load(data(write(row)), tokens)
    expected = load(data(write(ours, name="own.jsonl")), tokens)
    assert actual.ids_digest() == expected.ids_digest()
    assert actual.report.layout.startswith(f"{name} (")
    assert f"columns: {actual.report.layout}" in actual.report.lines()
    assert actual.report.unread == dict.fromkeys(unread.split(), 1)


def test_own_columns_are_no_layout(write) -> None:
    assert load(Data.Preferences(write(PAIR)), BytesTokenizer()).report.layout == ""
    assert load(Data.Conversations(write({"messages": CHAT})), BytesTokenizer()).report.layout == ""


def test_columns_are_renamed(write) -> None:
    row = {"question": "Capital? ", "good": "Paris", "bad": "Rome", "prompt": "not this", "id": 1}
    columns = {"question": "prompt", "good": "chosen", "bad": "rejected"}
    actual = load(Data.Preferences(write(row), columns=columns), BytesTokenizer())
    ours = write({"prompt": "Capital? ", "chosen": "Paris", "rejected": "Rome"}, name="own.jsonl")
    assert actual.ids_digest() == load(Data.Preferences(ours), BytesTokenizer()).ids_digest()
    assert actual.report.layout == "question as prompt, good as chosen, bad as rejected"
    assert actual.report.unread == {"id": 1}


def test_columns_turn_the_recognition_off(write) -> None:
    path = write(HH)
    plain = load(Data.Preferences(path, columns={"chosen": "chosen"}), BytesTokenizer())
    assert not plain.is_chat
    assert load(Data.Preferences(path), BytesTokenizer()).is_chat


def test_rewards_see_renamed_columns(write) -> None:
    data = Data.Prompts(write({"question": "1 + 1 = ", "solution": "2"}), columns={"question": "prompt"})
    assert load(data, BytesTokenizer()).columns[0] == {"prompt": "1 + 1 = ", "solution": "2"}


def test_a_column_that_is_not_there_is_refused(write) -> None:
    with pytest.raises(DataError) as error:
        load(Data.Preferences(write(ORCA), columns={"qestion": "prompt"}), BytesTokenizer())
    assert str(error.value) == "data.columns: rows.jsonl has no column 'qestion'; did you mean 'question'?"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "promt"}, "Data.Preferences reads no column 'promt'; did you mean 'prompt'?"),
        ({"question": "prompt", "system": "prompt"}, "'system' as 'prompt': one of the two is listed twice"),
        ((("chosen", "chosen"), ("chosen", "rejected")), "'chosen' as 'rejected': one of the two is listed twice"),
    ],
)
def test_columns_that_nothing_reads_are_refused_at_once(columns: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Data.Preferences("rows.jsonl", columns=columns)
    assert str(error.value) == f"1 problem in Data.Preferences\n  columns: {message}"


def test_text_reads_its_field_alone(write) -> None:
    path = write({"content": "a"})
    assert load(Data.Text(path, field="body", columns={"content": "body"}), BytesTokenizer()).row(0)["tokens"].size == 3
    with pytest.raises(SpecError, match=r"columns: Data\.Text reads no column 'text'; it reads body"):
        Data.Text(path, field="body", columns={"content": "text"})


@pytest.mark.parametrize(
    ("data", "row", "message"),
    [
        (
            Data.Conversations,
            {**ALPACA, "messages": CHAT},
            "the rows fit 2 layouts: messages and Alpaca (instruction, input, output); say which columns ",
        ),
        (
            Data.Conversations,
            {**ALPACA, **SHAREGPT},
            "the rows fit 2 layouts: ShareGPT (from and value in conversations) and Alpaca (",
        ),
        (
            Data.Preferences,
            {**ORCA, "prompt": "Capital?"},
            "the rows fit 2 layouts: prompt, chosen, rejected and Orca pairs (system, question, chosen, rejected); ",
        ),
    ],
)
def test_rows_that_fit_two_layouts_are_refused_with_both_names(write, data: Any, row: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        load(data(write(row)), BytesTokenizer())
    assert str(error.value).startswith(f"rows.jsonl: {message}")


def test_rows_of_another_layout_than_the_first_are_bad(write) -> None:
    path = write(*[ALPACA] * 3, {"messages": CHAT})
    with pytest.raises(DataError) as error:
        load(Data.Conversations(path), BytesTokenizer())
    reason = "the first rows are Alpaca (instruction, input, output); this row has: messages"
    assert str(error.value).endswith(f"  rows.jsonl:4: {reason}")
    report = load(Data.Conversations(path, bad_rows=BadRows.Skip(at_most=1)), BytesTokenizer()).report
    assert report.dropped == {"another layout": 1}


def test_a_transcript_without_an_answer_is_bad(write) -> None:
    with pytest.raises(DataError, match="field 'rejected': expected a transcript that ends with the Assistant's turn"):
        load(Data.Preferences(write({**HH, "rejected": "\n\nHuman: Hi"})), BytesTokenizer())


@pytest.mark.extended
def test_worker_processes_and_stored_tokens_read_the_layout(write, tmp_path) -> None:
    path = write(*({**HH, "chosen": f"{HH['chosen']} {number}"} for number in range(6000)))
    expected = load(Data.Preferences(path), BytesTokenizer())
    cache = TokenCache(tmp_path / "home", min_bytes=0, workers=2)
    for _ in range(2):
        actual = load(Data.Preferences(path), BytesTokenizer(), cache=cache)
        assert actual.ids_digest() == expected.ids_digest()
        assert actual.report == expected.report
    renamed = load(Data.Preferences(path, columns={"chosen": "chosen"}), BytesTokenizer(), cache=cache)
    assert renamed.ids_digest() != expected.ids_digest()  # another key of the cache
