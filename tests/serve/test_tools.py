"""Tools in chats: a model that has learned to call one is asked by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nnxdsl import Data, Experiment, Model, Objective, Optimizer, Schedule, Tokenizer
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from tests.fixtures.serving import KEY, serving

TEMPLATE = Path(__file__).parents[2] / "experiments" / "tools.jinja"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
QUESTION: dict[str, Any] = {"role": "user", "content": "2 and 3?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CHAT = [
    QUESTION,
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a model that knows one chat by heart."""
    place = tmp_path_factory.mktemp("tools")
    (place / "chats.jsonl").write_text((json.dumps({"messages": CHAT, "tools": TOOLS}) + "\n") * 4)
    experiment = Experiment(
        name="calls",
        model=Model.Qwen3("tiny", tokenizer=Tokenizer.Bytes(chat_template=str(TEMPLATE))),
        objective=Objective.SFT(loss_on="assistant"),
        data=Data.Conversations(str(place / "chats.jsonl"), max_length=320),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=3e-3)),
        batch_size=4,
        steps=80,
    )
    directory = run(experiment, place / "runs", Display(quiet=True)).directory
    with serving(directory.name, "--home", str(directory.parent), "--name", "tiny") as url:
        yield url


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server, api_key="a key")


def test_a_tool_is_called_and_its_result_read(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "max_completion_tokens": 120, "tools": TOOLS}
    (choice,) = client.chat.completions.create(**asked, messages=[QUESTION]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    again = client.chat.completions.create(**asked, messages=[QUESTION, choice.message.to_dict(), result])
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("It is 5.", "stop")
    # The same as a stream, whose one event has the whole message.
    events = list(client.chat.completions.create(**asked, messages=[QUESTION], stream=True))
    (delta,) = [event.choices[0].delta for event in events if event.choices[0].finish_reason == "tool_calls"]
    (part,) = delta.tool_calls or []
    assert (delta.content, part.index, part.function and part.function.arguments) == (
        "Let me see.",
        0,
        call.function.arguments,
    )


def test_what_is_cut_off_or_not_wanted_is_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "messages": [QUESTION], "tools": TOOLS}
    (cut,) = client.chat.completions.create(**asked, max_completion_tokens=40).choices
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert (cut.message.content or "").startswith('Let me see.<tool_call>{"name": "add"')
    (none,) = client.chat.completions.create(**asked, max_completion_tokens=4, tool_choice="none").choices
    without = {name: value for name, value in asked.items() if name != "tools"}
    (plain,) = client.chat.completions.create(**without, max_completion_tokens=4).choices
    assert none.message.content == plain.message.content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice: Input should be 'auto' or 'none'"),
        (
            {"tool_choice": "auto", "tools": []},
            "tool_choice is 'auto', and there are no tools; add them, or leave it out",
        ),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is not supported; leave it out"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "String should have at least 1 character"),
        ({"tools": [{**TOOLS[0], "function": {"name": "add", "strict": True}}]}, "Input should be False"),
        ({"messages": [QUESTION, {"role": "assistant", "tool_calls": [{}]}]}, "'tool_calls'[0]: expected"),
        ({"messages": [{**QUESTION, "tool_calls": [CALL]}]}, "only messages of the assistant may have 'tool_calls'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(server: str, fields: dict[str, Any], message: str) -> None:
    body = {"messages": [QUESTION], "tools": TOOLS, "max_tokens": 1, **fields}
    headers = {"Authorization": f"Bearer {KEY}"}
    actual = httpx.post(f"{server}/chat/completions", json=body, headers=headers, timeout=600)
    assert actual.status_code == 400
    assert message in actual.json()["error"]["message"]
