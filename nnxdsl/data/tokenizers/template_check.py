"""Checks that a chat template renders all contents of messages, by rendering them with marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.chat_template import ChatTemplate
from nnxdsl.data.tokenizers.messages import WEIGHT, Message, Tools, content_of

IDENTIFIERS = frozenset({"id", "tool_call_id", "type", "index"})
"""Fields of messages and tool calls that identify them; templates may leave them out."""

_MARK = "4711830592"
"""Digits, which no template escapes; a number follows them."""

_NOT_RENDERED = (
    "the chat template does not render it; set one that does with Tokenizer.File(path, chat_template=...), or remove "
    "it from the row"
)


def check_rendered(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools | None, *, is_prompt: bool = False
) -> tuple[str, ...]:
    """Refuses a chat if a content, a tool call or the tools are not in the rendered text.

    Each text gets a mark at its end, which must be in the text rendered with marks: the text itself may be there by
    chance.

    Returns:
        Warnings: contents that the template changes, and message fields that it ignores.

    Raises:
        RowError: Names the message and the part that is left out; or the template cannot render the chat.
    """

    def render(messages: Sequence[Message], tools: Tools | None = tools) -> str:
        return template.render_prompt(messages, tools=tools) if is_prompt else template.render(messages, tools=tools)

    whole = render(messages)
    if tools is not None and render(messages, None) == whole:
        raise RowError("not rendered", f"field 'tools': {_NOT_RENDERED}")
    _require_marks(messages, render)
    return tuple(_odd(messages, whole, render))


def _require_marks(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> None:
    marks: list[str] = []  # the location of each mark

    def mark(text: str, location: str) -> str:
        marks.append(location)
        return f"{text}{_MARK}{len(marks) - 1:06}"

    marked = [_marked(message, number, mark) for number, message in enumerate(messages, start=1)]
    try:
        text = render(marked)
    except RowError:  # the template accepts certain texts only, so it cannot be checked
        return
    for number, location in enumerate(marks):
        if f"{_MARK}{number:06}" not in text:
            raise RowError("not rendered", f"{location}: {_NOT_RENDERED}")


def _marked(message: Message, number: int, mark: Callable[[str, str], str]) -> Message:
    location, copied = f"message {number} of the chat ({message['role']})", dict(message)
    if content_of(message).strip():
        copied["content"] = mark(content_of(message), f"{location}, 'content'")
    if "tool_calls" in message:
        copied["tool_calls"] = [_marked_call(call, f"{location}, 'tool_calls'", mark) for call in message["tool_calls"]]
    return copied


def _marked_call(call: dict[str, Any], location: str, mark: Callable[[str, str], str]) -> dict[str, Any]:
    def marked(key: str, part: Any) -> Any:
        if key == "function":
            return _marked_call(part, location, mark)
        return part if key in IDENTIFIERS else _marked_value(part, location, mark)

    return {key: marked(key, part) for key, part in call.items()}


def _marked_value(value: Any, location: str, mark: Callable[[str, str], str]) -> Any:
    if isinstance(value, str):
        return mark(value, location)
    if isinstance(value, dict):
        return {mark(str(key), location): _marked_value(part, location, mark) for key, part in value.items()}
    return [_marked_value(part, location, mark) for part in value] if isinstance(value, list) else value


def _odd(messages: Sequence[Message], whole: str, render: Callable[[Sequence[Message]], str]) -> Iterator[str]:
    if not all(_is_in(content_of(message).strip(), whole) for message in messages):
        yield "text changed by the chat template"
    names = {name for message in messages for name in message} - {"role", "content", "tool_calls", WEIGHT} - IDENTIFIERS
    if any(_is_ignored(name, messages, whole, render) for name in sorted(names)):
        yield "message field ignored by the chat template"


def _is_in(text: str, whole: str) -> bool:
    return text in whole or any(json.dumps(text, ensure_ascii=plain)[1:-1] in whole for plain in (False, True))


def _is_ignored(name: str, messages: Sequence[Message], whole: str, render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether the rendered text is the same without the field of some message."""
    for place, message in enumerate(messages):
        if name not in message:
            continue
        rest = {key: part for key, part in message.items() if key != name}
        try:
            if render([*messages[:place], rest, *messages[place + 1 :]]) == whole:
                return True
        except RowError:  # the field is required
            continue
    return False
