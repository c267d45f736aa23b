"""Plain values as readable YAML: the subset that the generated files need."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

_PLAIN = re.compile(r"[A-Za-z/~][A-Za-z0-9_./~-]*(:[A-Za-z0-9_./-]+)*")
_WORDS = frozenset({"~", "true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"})
"""Words that some YAML readers do not take as text."""


def to_yaml(value: object) -> str:
    """The YAML document of JSON values; text of several lines becomes a block."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, item in cast("Mapping[str, object]", value).items():
            yield from _item(f"{_text(name)}:", item)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for item in cast("Sequence[object]", value):
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _item(opening: str, value: object) -> Iterator[str]:
    if isinstance(value, str) and _is_block(value):
        yield f"{opening} |"
        yield from (f"  {line}" if line else "" for line in value.rstrip("\n").split("\n"))
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, str) and value:
        yield opening
        yield from (f"  {line}" for line in _lines(cast("object", value)))
    else:
        yield f"{opening} {_scalar(value)}"


def _is_block(text: str) -> bool:
    """Whether a block preserves the text: lines of printable characters, one newline at the end."""
    lines = text.removesuffix("\n").split("\n")
    is_whole = text.endswith("\n") and not text.endswith("\n\n")
    begins = lines[0] != "" and not lines[0].startswith(" ")
    return is_whole and begins and all(line == "" or line.isprintable() for line in lines)


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    return {"\n": "\\n", "\t": "\\t"}.get(character) or f"\\U{ord(character):08X}"
