"""Messages of chats in rows, checked: roles, text, tool calls, tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nnxdsl.config.core.strict_json import parse_json
from nnxdsl.config.data import ROLES
from nnxdsl.data.loaders.files import RowError, kind_of

Message = dict[str, Any]
"""`{"role": ..., "content": text}`; other fields (`name`, `tool_calls`) are passed on to the template."""

Tools = list[dict[str, Any]]
"""JSON schemas of functions, as the `tools` of a row."""

WEIGHT = "weight"
"""Field of an assistant's message in the formats of OpenAI and Mistral: 0 keeps it out of the loss."""

_FUNCTION_CALL = "function_call"
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", **{role: role for role in ROLES}}
_MEDIA = ("image", "audio", "video")
_CALL = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'


def read_messages(value: object, field: str, roles: Mapping[str, str] | None = None) -> list[Message]:
    """The messages of a row, each with a role and a text as content.

    Content in parts (`[{"type": "text", "text": ...}]`) is joined; ShareGPT's `from`/`value` are supported. An
    assistant's message may have OpenAI's `tool_calls`, and then needs no content; the `value` of a `function_call` is
    the JSON text of a call, or of a list of calls.

    Args:
        value: The field's value.
        field: Its name.
        roles: New names of roles.

    Raises:
        RowError: Names the problem and the message (from 1).
    """
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else kind_of(value)
        raise RowError("wrong type", f"field '{field}': expected a list of messages, got {got}")
    named = roles or {}
    return [_message(item, f"field '{field}', message {number}", named) for number, item in enumerate(value, start=1)]


def read_tools(row: Mapping[str, Any]) -> Tools | None:
    """The functions in the field `tools`, for the chat template; None if there are none.

    Raises:
        RowError: The field is neither a list of objects nor its JSON text.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise RowError("wrong type", f"field 'tools': expected JSON in its text: {error}") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError("wrong type", "field 'tools': expected a list of JSON schemas of functions, or its JSON text")
    return [dict(tool) for tool in tools]


def content_of(message: Message) -> str:
    """The text of a message, "" if it has only tool calls."""
    return message.get("content") or ""


def with_answer(prompt: Sequence[Message], answer: Message) -> list[Message]:
    """The chat with an answer, which continues the last message if that is the assistant's (a prefill)."""
    if not prompt or prompt[-1]["role"] != "assistant":
        return [*prompt, answer]
    prefill = {name: value for name, value in prompt[-1].items() if name != WEIGHT}
    return [*prompt[:-1], {**prefill, **answer, "content": content_of(prefill) + content_of(answer)}]


def has_loss(message: Message) -> bool:
    """Whether an assistant's message may be learnt from: its `weight` is not 0."""
    return message.get(WEIGHT, 1) != 0


def is_blank(message: Message) -> bool:
    """Whether a message has neither text nor tool calls."""
    return not content_of(message).strip() and not message.get("tool_calls")


def odd_messages(messages: Sequence[Message]) -> Iterator[str]:
    """Warnings for a valid chat."""
    if any(is_blank(message) for message in messages):
        yield "blank message"
    if any(isinstance(call.get("function", call).get("arguments"), str) for call in _calls(messages)):
        yield "tool arguments that are no JSON object"
    if all(message["role"] == "assistant" for message in messages):
        yield "only assistant messages"


def _calls(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield from message.get("tool_calls", ())


def require_no_media(row: Mapping[str, Any], location: str = "") -> None:
    """Refuses a row or a message with images, audio or video beside its text, as datasets for vision have them.

    Args:
        row: Its fields.
        location: What messages begin with.

    Raises:
        RowError: Names the field.
    """
    for medium in _MEDIA:
        for name in (medium, f"{medium}s"):
            if row.get(name) not in (None, "", []):
                raise _no_media(f"{location}field '{name}'", medium)


def _no_media(what: str, medium: str) -> RowError:
    return RowError(
        "not text",
        f"{what}: no model reads {medium} input yet, and the text alone would mean something else; leave such rows out",
    )


def texts(value: object) -> Iterator[str]:
    """Every text in a JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            if not isinstance(item, int):
                yield from texts(item)


def _message(item: object, location: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(item, Mapping):
        raise RowError("wrong type", f"{location}: expected an object with 'role' and 'content', got {kind_of(item)}")
    # Exports write an empty list location there are no calls.
    message = {str(key): part for key, part in item.items() if part is not None and (key, part) != ("tool_calls", [])}
    require_no_media(message, f"{location}: ")
    for name in ("from", "role"):
        if isinstance(message.get(name), str):
            message[name] = roles.get(message[name], message[name])
    if "from" in message and "value" in message:
        if "role" in message or "content" in message:
            raise RowError("two forms", f"{location}: has both from/value and role/content; keep one of them")
        role, value = message.pop("from"), message.pop("value")
        if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
            got = repr(role[:40]) if isinstance(role, str) else kind_of(role)
            names = ", ".join(_SHAREGPT_ROLES)
            raise RowError("wrong type", f"{location}: 'from' is {got}; expected one of {names}; or map it with roles")
        message |= {"role": _SHAREGPT_ROLES[role], "content": value}
    if message.get("role") == _FUNCTION_CALL:
        message |= {"role": "assistant", "tool_calls": _calls_in(message.pop("content", None), location)}
    if "role" in message and not isinstance(message["role"], str):
        raise RowError("wrong type", f"{location}: 'role': expected text, got {kind_of(message['role'])}")
    if "tool_calls" in message:
        if message.get("role") != "assistant":
            raise RowError("wrong type", f"{location}: only messages of the assistant may have 'tool_calls'")
        message["tool_calls"] = _tool_calls(message["tool_calls"], location)
        if "content" in item:
            message.setdefault("content", None)  # null, as in OpenAI's format
    _require_weight(message, location)
    for name in ("role", "content"):
        if name not in message and not (name == "content" and "tool_calls" in message):
            has = ", ".join(message) or "nothing"
            raise RowError("missing field", f"{location}: '{name}' is missing; this message has: {has}")
    if message.get("content") is not None:
        message["content"] = _content(message["content"], location)
    return message


def _require_weight(message: Message, location: str) -> None:
    weight = message.get(WEIGHT)
    if weight is None or (weight == 0 and message.get("role") != "assistant"):
        return
    if isinstance(weight, str) or weight not in (0, 1):
        raise RowError("wrong type", f"{location}: 'weight': expected 0 or 1, got {weight!r:.40}")
    if message.get("role") != "assistant":
        raise RowError("wrong type", f"{location}: 'weight': only messages of the assistant have a loss")


def _calls_in(value: object, location: str) -> list[Any]:
    """The calls in the `value` of a ShareGPT message: an object or a list of them, or its JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            what = f"expected the JSON text of {_CALL} or a list of them: {error}"
            raise RowError("wrong type", f"{location}: {what}") from error
    return value if isinstance(value, list) else [value]


def _content(content: object, location: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("wrong type", f"{location}: 'content': expected text, got {kind_of(content)}")
    return "".join(_text_of_part(part, location) for part in content)


def _text_of_part(part: object, location: str) -> str:
    fields = {key: item for key, item in part.items() if item is not None} if isinstance(part, Mapping) else {}
    text, kind = fields.pop("text", None), str(fields.get("type", ""))
    medium = next((medium for medium in _MEDIA if medium in kind or any(medium in str(key) for key in fields)), None)
    if medium is not None:
        raise _no_media(f"{location}: 'content': a part of type {kind[:40] or medium!r}", medium)
    if not isinstance(text, str) or fields.pop("type", "text") != "text":
        raise RowError("wrong type", f"{location}: 'content': only text parts can be read, got {str(part)[:60]}")
    if fields:
        names = ", ".join(map(str, fields))
        raise RowError("wrong type", f"{location}: 'content': a text part has fields that are not read: {names[:60]}")
    return text


def _tool_calls(calls: object, location: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError("wrong type", f"{location}: 'tool_calls': expected a list of {_CALL}, got {kind_of(calls)}")
    return [_tool_call(call, f"{location}: 'tool_calls'[{place}]") for place, call in enumerate(calls)]


def _tool_call(call: object, location: str) -> dict[str, Any]:
    """A call in OpenAI's format, or its function alone."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RowError("wrong type", f"{location}: expected {_CALL}, got {kind_of(function)}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name.strip():
        raise RowError("wrong type", f"{location}: expected {_CALL}, but its name is {kind_of(name)}")
    if not isinstance(arguments, Mapping | str | None):
        raise RowError(
            "wrong type", f"{location}: 'arguments': expected an object or its JSON text, got {kind_of(arguments)}"
        )
    parts = {key: part for key, part in call.items() if part is not None}
    function_parts = parts if function is call else {key: part for key, part in function.items() if part is not None}
    if isinstance(arguments, str):
        function_parts["arguments"] = _object_of(arguments)
    return function_parts if function is call else {**parts, "function": function_parts}


def _object_of(arguments: str) -> dict[str, Any] | str:
    """The object in the JSON text of arguments, as templates read them; another text as it is."""
    try:
        value = parse_json(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
