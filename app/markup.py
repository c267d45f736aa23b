"""Builds HTML, in which all text is escaped unless it is `Html` already, and Markdown. Independent of pages."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlencode

Child = object  # an `Html`, a text or number (escaped), None (omitted), or an iterable of children


class Html(str):
    """Text that is safe HTML: created only by the functions of this file, from escaped parts."""

    __slots__ = ()


def join(*children: Child, sep: str = "") -> Html:
    """Concatenates children.

    >>> join("a < b", None, [tag("b", "c")])
    'a &lt; b<b>c</b>'
    """
    return Html(html.escape(sep).join(_parts(children)))


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """Returns an element that is not void.

    Args:
        name: Tag name.
        children: Content.
        attributes: `cls` is `class`, `for_` is `for`, an underscore inside a name is a hyphen; True is an
            attribute without a value, None and False are omitted, a mapping or list is written as JSON.

    >>> tag("a", "x > y", href='/run?id="a"', data_do="runs.stop", hidden=True)
    '<a href="/run?id=&quot;a&quot;" data-do="runs.stop" hidden>x &gt; y</a>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    return Html(f"<{name}{written}>{''.join(_parts(children))}</{name}>")


def link(path: str, /, **query: object) -> str:
    """Returns a path of the app with a query; values that are None or empty are omitted.

    >>> link("/run", id="a b", tab=None)
    '/run?id=a+b'
    """
    parameters = {key: value for key, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(parameters)}" if parameters else path


def plain(text: str) -> str:
    r"""A text in which Markdown and HTML have no meaning.

    >>> plain("a_b <img> [c](d)")
    'a\\_b &lt;img&gt; \\[c\\](d)'
    """
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]#|~$!])", r"\\\1", escaped).replace("\n", " ").replace("\r", " ")


def markdown_link(text: str, path: str, /, **query: object) -> str:
    """Returns a link to a page of the app, as Markdown."""
    return f"[{plain(text)}]({link(path, **query)})"


def _parts(children: Iterable[Child]) -> list[str]:
    parts: list[str] = []
    for child in children:
        if isinstance(child, Iterable) and not isinstance(child, str):
            parts += _parts(child)
        elif child is not None and child is not False:
            parts.append(child if isinstance(child, Html) else html.escape(str(child)))
    return parts


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = "class" if key == "cls" else key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping | list | tuple) else str(value)
    return f' {name}="{html.escape(text)}"'
