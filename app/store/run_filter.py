"""The text that filters runs: `state:failed tag:baseline gemma`. Independent of pages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .index import Row

_COMPARED = re.compile(r"([\w./]+)(<=|>=|=|<|>)(.+)")
EVERYTHING = "*"  # a word that every run matches, for a text that must not be empty


def kind_of(row: Row) -> str:
    """State of a run as it is filtered by: `running` while its process is alive."""
    return "running" if row.is_live else row.state


def is_found(row: Row, tags: Sequence[str], text: str) -> bool:
    """Whether a run with these tags matches every word of a text.

    `state:NAME` and `tag:NAME` match as a whole; `lr>1e-4`, `seed=3` and the like compare a setting or metric by the
    end of its path; others match a part of id, state, objective, model, mesh, adapter or tags.
    """
    searched = f"{row.text} {' '.join(tags).lower()}"

    def matches(word: str) -> bool:
        kind, _, name = word.partition(":")
        if kind == "state" and name:
            return name in (row.state, kind_of(row))
        if kind == "tag" and name:
            return name in tags
        if (compared := _COMPARED.fullmatch(word)) is not None:
            return any(_holds(value, *compared.groups()[1:]) for value in values_of(row, compared[1]))
        return word == EVERYTHING or word.lower() in searched

    return all(map(matches, text.split()))


def values_of(row: Row, name: str) -> list[object]:
    """Values of the settings and metrics of a run whose path is a name, or ends in it."""
    return [
        value
        for values in (row.settings, row.metrics)
        for path, value in values.items()
        if path == name or path.endswith((f".{name}", f"/{name}"))
    ]


def number_of(value: object) -> float | None:
    """A number, or the one that a text is; None for other values."""
    try:
        return None if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _holds(value: object, sign: str, wanted: str) -> bool:
    one, other = number_of(value), number_of(wanted)
    if one is None or other is None:
        return sign == "=" and str(value).lower() == wanted.lower()
    return {"=": one == other, "<": one < other, ">": one > other, "<=": one <= other, ">=": one >= other}[sign]


def filter_text(text: str, state: str = "", tag: str = "") -> str:
    """Joins words, a state and a tag to one filter; `*` if all are empty."""
    parts = [f"state:{state}" if state else "", f"tag:{tag}" if tag else "", text.strip()]
    return " ".join(filter(None, parts)) or EVERYTHING
