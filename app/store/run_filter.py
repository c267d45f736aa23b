"""The text that filters runs: `state:failed tag:baseline gemma`. Independent of pages."""

from __future__ import annotations

from collections.abc import Sequence

from .index import Row

EVERYTHING = "*"
"""A word that every run matches, for a text that must not be empty."""


def kind_of(row: Row) -> str:
    """State of a run as it is filtered by: `running` while its process is alive."""
    return "running" if row.is_live else row.state


def is_found(row: Row, tags: Sequence[str], text: str) -> bool:
    """Whether a run with these tags matches every word of a text.

    `state:NAME` and `tag:NAME` match as a whole, others a part of id, state, objective, model, mesh, adapter or tags.
    """
    searched = f"{row.text} {' '.join(tags).lower()}"

    def matches(word: str) -> bool:
        kind, _, name = word.partition(":")
        if kind == "state" and name:
            return name in (row.state, kind_of(row))
        if kind == "tag" and name:
            return name in tags
        return word == EVERYTHING or word.lower() in searched

    return all(map(matches, text.split()))


def filter_text(words: str, state: str = "", tag: str = "") -> str:
    """Joins words, a state and a tag to one filter; `*` if all are empty."""
    parts = [f"state:{state}" if state else "", f"tag:{tag}" if tag else "", words.strip()]
    return " ".join(filter(None, parts)) or EVERYTHING
