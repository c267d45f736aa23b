"""Markdown of texts that a run supplies: shown as they are."""

from __future__ import annotations

import re


def plain(text: str) -> str:
    r"""A text in which Markdown and HTML have no meaning.

    >>> plain("a_b <img> [c](d)")
    'a\\_b &lt;img&gt; \\[c\\](d)'
    """
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]#|~$!])", r"\\\1", escaped).replace("\n", " ").replace("\r", " ")


def link(text: str, path: str) -> str:
    """A link to a page of the app."""
    return f"[{plain(text)}]({path})"
