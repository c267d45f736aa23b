"""Tool calls in what an assistant writes, in the formats of chat templates.

A format is found by reading back a call that the template itself has rendered.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from nnxdsl.config.core.strict_json import parse_json
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.chat_template import ChatTemplate
from nnxdsl.data.tokenizers.messages import Tools
from nnxdsl.errors import DataError


class ToolCall(NamedTuple):
    """A function that a model calls.

    Attributes:
        name: Of the function.
        arguments: By name; text where the format has no types. None if what stands there cannot be read.
        start: Where the call begins in the text.
    """

    name: str
    arguments: dict[str, Any] | None
    start: int


Reader = Callable[[str], list[ToolCall]]
"""The calls in a text, in their order."""


def _json_calls(pattern: str, arguments: str = "arguments") -> Reader:
    """Calls that are objects in JSON, each the first group of a match."""
    expression = re.compile(pattern, re.DOTALL)

    def read(text: str) -> list[ToolCall]:
        return [call for match in expression.finditer(text) for call in _in_json(match, arguments)]

    return read


def _named_calls(pattern: str, read_arguments: Callable[[str], dict[str, Any] | None]) -> Reader:
    """Calls with the name in the first group of a match, and the arguments in the second."""
    expression = re.compile(pattern, re.DOTALL)

    def read(text: str) -> list[ToolCall]:
        return [
            ToolCall(match[1].strip(), read_arguments(match[2]), match.start()) for match in expression.finditer(text)
        ]

    return read


def _in_json(match: re.Match[str], arguments: str) -> Iterator[ToolCall]:
    """The calls in an object, or in a list of them."""
    try:
        value = parse_json(match[1])
    except ValueError:
        value = None
    for one in value if isinstance(value, list) else [value]:
        call = one if isinstance(one, Mapping) else {}
        name, call_arguments = call.get("name"), call.get(arguments)
        readable = dict(call_arguments) if isinstance(call_arguments, Mapping) else None
        yield ToolCall(name if isinstance(name, str) else "", readable, match.start())


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _elements(pattern: str) -> Callable[[str], dict[str, Any] | None]:
    """Arguments in elements, each with its name in the first group of a match and its text in the second."""
    expression = re.compile(pattern, re.DOTALL)
    return lambda text: {match[1].strip(): match[2] for match in expression.finditer(text)}


def _keywords(text: str) -> dict[str, Any] | None:
    """Arguments as in a call of Python, of literals alone."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes
            call = ast.parse("f({})".format(text.replace("\n", "\\n")), mode="eval").body  # line breaks in texts
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            return None
        return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _gemma_object(text: str) -> dict[str, Any] | None:
    """Arguments as in JSON, but with names that have no quotes, and texts between `<|"|>`."""
    parts = text.split('<|"|>')
    quoted = [json.dumps(part) if place % 2 else _BARE_NAME.sub(r'"\1":', part) for place, part in enumerate(parts)]
    return _object("".join(quoted))


_BARE_NAME = re.compile(r"([A-Za-z_][\w.-]*)\s*:")

READERS: Mapping[str, Reader] = {
    # Qwen 2.5 and 3, Hermes, SmolLM 3; without an end where that is the end of the text
    "hermes": _json_calls(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|\Z)"),
    # Qwen 3 Coder, Qwen 3.5, Nemotron 3
    "qwen xml": _named_calls(
        r"<tool_call>\s*<function=([^\n>]+)>(.*?)</function>\s*(?:</tool_call>|\Z)",
        _elements(r"<parameter=([^\n>]+)>\n?(.*?)\n?</parameter>"),
    ),
    # GLM 4.5
    "glm": _named_calls(
        r"<tool_call>\s*([^\s<{]+)\s*(.*?)(?:</tool_call>|\Z)",
        _elements(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
    ),
    # Mistral since version 11 of its tokenizers, and before it
    "mistral": _named_calls(
        r"\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*?\})(?=\s*(?:\[TOOL_CALLS\]|\Z|</s>))", _object
    ),
    "mistral list": _json_calls(r"\[TOOL_CALLS\]\s*(\[.*\])"),
    "deepseek": _named_calls(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\n```json\n)(.*?)(?:\n```)?<｜tool▁call▁end｜>",
        _object,
    ),
    # Gemma 4
    "gemma": _named_calls(r"<\|tool_call>\s*call:([\w.-]+)\s*(\{.*?\})\s*<tool_call\|>", _gemma_object),
    # gpt-oss
    "harmony": _named_calls(r"to=functions\.([\w.-]+)[^{]*?<\|message\|>(.*?)(?:<\|call\|>|\Z)", _object),
    # LFM 2
    "python": _named_calls(
        r"(?:<\|tool_call_start\|>\[|(?<=\)),\s*)([\w.]+)\((.*?)\)(?=,\s*\w+\(|\]<\|tool_call_end\|>)", _keywords
    ),
    # Llama 3.1: a text that is a call and nothing else
    "llama": _json_calls(
        r"\A\s*(?:<\|python_tag\|>)?\s*(\{\s*\"name\".*\})\s*(?:<\|e[om_t]*_id\|>)?\s*\Z", "parameters"
    ),
}
"""The formats of templates by a name of each."""

_PROBE = {"name": "look_up", "arguments": {"question": "what is it"}}


def typed_arguments(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with the types of a schema: what a format gives as text is JSON, unless it is to be text.

    Args:
        arguments: As they were read.
        parameters: The JSON schema of the function's parameters.
    """
    schemas = parameters.get("properties") or {}
    return {name: _typed(value, schemas.get(name) or {}) for name, value in arguments.items()}


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or "string" in schema.get("type", "string"):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def reader_of(template: ChatTemplate, tools: Tools) -> Reader:
    """What reads the calls that a chat template writes.

    Args:
        template: The chat template.
        tools: Functions that it renders.

    Raises:
        DataError: It renders no tool calls, or in a format that is not known.
    """
    call = {"type": "function", "id": "call00001", "function": _PROBE}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        openings = [template.render(chat[:1], add_generation_prompt=prompts, tools=tools) for prompts in (True, False)]
        whole = template.render(chat, tools=tools)
    except RowError as error:
        raise DataError(f"the chat template renders no tool calls: {error}") from error
    written = [whole.removeprefix(opening) for opening in openings]
    for read in READERS.values():
        for text in written:
            if [(one.name, one.arguments) for one in read(text)] == [(_PROBE["name"], _PROBE["arguments"])]:
                return read
    raise DataError(
        f"the chat template writes a tool call as {written[0].strip()[:200]!r}, in none of the formats that can be "
        f"read: {', '.join(READERS)}; set chat_template of the tokenizer to one that writes one of them"
    )
