"""Whether a chat template writes all that the messages hold, found by what changes in its text. Knows no tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.chat_template import ChatTemplate
from nnxdsl.data.tokenizers.messages import Message, Tools, content_of

IDENTIFIERS = frozenset({"id", "tool_call_id", "type", "index"})
"""Fields of messages and tool calls that tell them apart and are no text; templates may leave them out."""

_MARK = "4711830592"
"""Digits, which a template writes as they stand whatever it escapes; a number follows them."""

_CURE = "give one that does with Tokenizer.File(path, chat_template=...), or take it out of the row"


def check_written(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools | None, *, add_generation_prompt: bool = False
) -> tuple[str, ...]:
    """Refuses a chat of which a content, a tool call or the tools are not in the rendered text.

    Each text is marked at its end, and each mark must be in the text that is rendered then; so a text that by chance
    stands elsewhere is not taken for written.

    Returns:
        What else deserves a look: contents that the template changes, and further fields that it does not read.

    Raises:
        RowError: Names the message and what is left out of it; or the template refuses the chat.
    """

    def render(messages: Sequence[Message], tools: Tools | None = tools) -> str:
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    whole = render(messages)
    if tools is not None and render(messages, None) == whole:
        raise RowError("not rendered", f"field 'tools': the chat template does not write it; {_CURE}")
    _require_marks(messages, render)
    return tuple(_odd(messages, whole, render))


def _require_marks(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> None:
    marks: list[str] = []  # by number: what bears it

    def mark(text: str, what: str) -> str:
        marks.append(what)
        return f"{text}{_MARK}{len(marks) - 1:06}"

    marked = [_marked(message, number, mark) for number, message in enumerate(messages, start=1)]
    try:
        text = render(marked)
    except RowError:  # it accepts certain texts alone, so that nothing can be found out about it
        return
    for number, what in enumerate(marks):
        if f"{_MARK}{number:06}" not in text:
            raise RowError("not rendered", f"{what}: the chat template does not write it; {_CURE}")


def _marked(message: Message, number: int, mark: Callable[[str, str], str]) -> Message:
    where, copied = f"message {number} of the chat ({message['role']})", dict(message)
    if content_of(message).strip():
        copied["content"] = mark(content_of(message), f"{where}, 'content'")
    if "tool_calls" in message:
        copied["tool_calls"] = [_marked_call(call, f"{where}, 'tool_calls'", mark) for call in message["tool_calls"]]
    return copied


def _marked_call(call: dict[str, Any], where: str, mark: Callable[[str, str], str]) -> dict[str, Any]:
    def marked(key: str, part: Any) -> Any:
        if key == "function":
            return _marked_call(part, where, mark)
        if key in IDENTIFIERS:
            return part
        return _marked_value(part, where, mark)

    return {key: marked(key, part) for key, part in call.items()}


def _marked_value(value: Any, where: str, mark: Callable[[str, str], str]) -> Any:
    if isinstance(value, str):
        return mark(value, where)
    if isinstance(value, dict):
        return {mark(str(key), where): _marked_value(part, where, mark) for key, part in value.items()}
    return [_marked_value(part, where, mark) for part in value] if isinstance(value, list) else value


def _odd(messages: Sequence[Message], whole: str, render: Callable[[Sequence[Message]], str]) -> Iterator[str]:
    if not all(_is_in(content_of(message).strip(), whole) for message in messages):
        yield "text changed by the chat template"
    names = {name for message in messages for name in message} - {"role", "content", "tool_calls"} - IDENTIFIERS
    if any(_is_ignored(name, messages, whole, render) for name in sorted(names)):
        yield "message field ignored by the chat template"


def _is_in(text: str, whole: str) -> bool:
    return text in whole or any(json.dumps(text, ensure_ascii=plain)[1:-1] in whole for plain in (False, True))


def _is_ignored(name: str, messages: Sequence[Message], whole: str, render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether the rendered text stays the same without the field of one of the messages."""
    for place, message in enumerate(messages):
        if name not in message:
            continue
        rest = {key: part for key, part in message.items() if key != name}
        try:
            if render([*messages[:place], rest, *messages[place + 1 :]]) == whole:
                return True
        except RowError:  # it cannot do without
            continue
    return False
