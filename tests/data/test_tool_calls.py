"""Tool calls as the chat templates of published models write them, and what models write instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl.data.tokenizers.chat_template import ALL_OF_A_TURN, TURNS, ChatTemplate
from nnxdsl.data.tokenizers.tool_calls import READERS, ToolCall, reader_of
from nnxdsl.errors import DataError

STORED = json.loads((Path(__file__).parents[1] / "reference" / "tool_calls.json").read_text(encoding="utf-8"))
UNKNOWN = {"muse_glimmer"}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


def as_text(calls: list[ToolCall]) -> list[tuple[str, dict[str, str] | None]]:
    """Names and arguments; some formats write a number as they write a text."""
    return [
        (call.name, None if call.arguments is None else {name: str(value) for name, value in call.arguments.items()})
        for call in calls
    ]


@pytest.mark.parametrize("template", sorted(STORED["texts"].keys() - UNKNOWN))
def test_one_format_reads_what_a_template_of_trl_writes(template: str) -> None:
    formats = []
    for count, text in STORED["texts"][template].items():
        # gpt-oss writes one call a turn, whatever it is given.
        arguments = STORED["arguments"][: 1 if template == "gptoss" else int(count)]
        expected = [("look_up", {name: str(value) for name, value in one.items()}) for one in arguments]
        formats.append([name for name, read in READERS.items() if as_text(read(text)) == expected])
    assert all(len(actual) == 1 for actual in formats), formats
    assert len({actual[0] for actual in formats}) == 1


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        ("hermes", "I look.\n<tool_call>\n{}\n</tool_call>", [("", None)]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [("f", None)]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', [("", None)]),  # no end of the object
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),  # the end is a stop token
        ("hermes", "no call", []),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g{}</s>', [("f", {"a": "{'b': 1}"}), ("g", {})]),
        ("mistral list", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]', [("f", {"a": "1"})]),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', [("f", {"a": "1"})]),
        ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>', [("f", {})]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', [("f", {"a": "1"})]),
        ("llama", 'It is {"name": "f", "parameters": {}}', []),
        ("python", "<|tool_call_start|>[f(a=__import__('os'))]<|tool_call_end|>", [("f", None)]),
        ("python", r"<|tool_call_start|>[f(a='\d')]<|tool_call_end|>", [("f", {"a": r"\d"})]),
    ],
)  # fmt: skip
def test_what_models_write(format: str, text: str, calls: list[tuple[str, dict[str, str] | None]]) -> None:
    assert as_text(READERS[format](text)) == calls


def test_where_a_call_begins() -> None:
    (call,) = READERS["hermes"]('So: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert call.start == 4


PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<|tool_call>",
        "<tool_call|>",
        "call:f",
        '<|"|>',
    ),
    *(
        "to=functions.f",
        "<|message|>",
        "<|call|>",
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        "f(",
        ")",
        "a=",
        "**a",
    ),
    *(
        '{"name": "f", ',
        '"arguments": ',
        '"parameters": ',
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        ",",
        ":",
        "\\",
        "\n",
        " ",
        "f",
        "1",
    ),
    *("[" * 5_000, "{'a':" * 2_000, "-" * 5_000, "9" * 5_000, "\0", "\ud800"),
)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_whatever_a_model_writes_is_read(text: str) -> None:
    for read in READERS.values():
        for call in read(text):
            assert isinstance(call.name, str)
            assert isinstance(call.arguments, dict | None)
            assert 0 <= call.start <= len(text)


HERMES = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)


def test_the_format_is_that_of_the_template() -> None:
    assert reader_of(ChatTemplate(HERMES, bos_token="", eos_token=""), TOOLS) is READERS["hermes"]
    for source, written in ((TURNS, "<end_of_turn>"), (ALL_OF_A_TURN, '"id": "call00001"')):
        with pytest.raises(
            DataError, match=f"the chat template writes a tool call as .*{written}.* in none of the format"
        ):
            reader_of(ChatTemplate(source, bos_token="", eos_token=""), TOOLS)
    refusing = "{% if messages[-1]['tool_calls'] %}{{ raise_exception('no calls here') }}{% endif %}"
    with pytest.raises(DataError, match=r"the chat template renders no tool calls: .* no calls here"):
        reader_of(ChatTemplate(refusing, bos_token="", eos_token=""), TOOLS)
