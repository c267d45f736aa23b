"""Plain JSON objects as values of fields: immutable, and equal if and only if their JSON is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from nnxdsl.config.core.strict_json import is_nested_beyond

MAX_DEPTH = 16
"""Levels of nesting that are read."""


class JsonObject(Mapping[str, Any]):
    """A mapping of names to JSON values: None, bool, int, finite float, text, lists (or tuples) and mappings of these.

    Raises:
        ValueError: There is another value inside; the message says where.
    """

    __slots__ = ("_text",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        if is_nested_beyond(items, MAX_DEPTH):
            raise ValueError(f"is nested too deeply; at most {MAX_DEPTH} levels are read")
        self._text = json.dumps(_plain(items, ""), sort_keys=True, ensure_ascii=False)

    def __getitem__(self, name: str) -> Any:
        return self.as_dict()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, JsonObject):
            return self._text == other._text
        try:
            return isinstance(other, Mapping) and self == JsonObject(cast("Mapping[str, Any]", other))
        except ValueError:
            return False

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return repr(self.as_dict())

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonObject, (self.as_dict(),)

    def as_dict(self) -> dict[str, Any]:
        """A new dict with the same values."""
        return json.loads(self._text)


if TYPE_CHECKING:
    Json = Mapping[str, Any]
else:
    Json = JsonObject
    """Annotates a field that is written as a mapping of JSON values and held as a `JsonObject`."""


def _plain(value: object, path: str) -> Any:
    if isinstance(value, JsonObject):
        return value.as_dict()
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        for name in items:
            if type(name) is not str:
                raise ValueError(f"{path or 'a name'}: expected text as name, got {name!r}")
        return {_text(str(name), path): _plain(item, f"{path}[{name!r}]") for name, item in items.items()}
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(items)]
    if type(value) is str:
        return _text(value, path)
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    raise ValueError(f"{path or 'the value'}: expected a plain JSON value, got {value!r}")


def _text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{path or 'the value'}: expected text that UTF-8 can hold, got {text!r}") from None
    return text
