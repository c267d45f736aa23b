"""What is asked of a built page of gradio components: its updates as they are sent, its buttons, and its actions."""

from __future__ import annotations

import inspect
import json
import re
import urllib.parse
import warnings
from collections.abc import Iterator
from typing import Any

import gradio as gr

from app.pages import demo
from tests.app.native import Built

NAMED = (gr.Dropdown, gr.Radio, gr.Checkbox, gr.Textbox)


def asked(query: dict[str, str]) -> str:
    return "?" + urllib.parse.urlencode(query)


def updates(built: Built, **query: str) -> dict[str, Any]:
    """What is sent for a query, by the component's label where it has one, or else by its class."""
    load, found = built.handler("load"), {}
    for component, value in zip(load.outputs, load.fn("{}", asked(query), "{}"), strict=True):
        name = (component.label if isinstance(component, NAMED) else None) or type(component).__name__
        found[f"{name} {sum(key.startswith(name) for key in found)}" if name in found else name] = value
    return found


def built_buttons(built: Built) -> set[str]:
    """All buttons that a page could show."""
    return {str(one.value) for one in built.blocks.blocks.values() if isinstance(one, gr.Button)}


def offered(built: Built, **query: str) -> dict[str, str | None]:
    """The buttons that a page shows for a query, with what those lead to that are links."""
    load, found = built.handler("load"), {}
    for component, value in zip(load.outputs, load.fn("{}", asked(query), "{}"), strict=True):
        if isinstance(component, gr.Button) and isinstance(value, dict) and value.get("visible", "link" in value):
            found[str(component.value)] = value.get("link")
    return found


def click(built: Built, text: str, *values: Any, **query: str) -> dict[str, Any]:
    """Clicks the last button with a text that does something; returns what it writes and opens."""
    by_id = built.blocks.blocks
    functions = [
        one.fn
        for one in built.blocks.fns.values()
        if one.fn is not None and one.targets[0][1] == "click" and by_id[one.targets[0][0]].value == text
    ]
    return json.loads(functions[-1](gr.Request(client=None), asked(query), *values))


def everything(built: Built, query: dict[str, str], text: str, *, acts: bool = True) -> Iterator[str]:
    """Everything that a page answers: each of its functions, with a text in every field that it takes.

    Args:
        built: The page.
        query: The query of its URL.
        text: The text.
        acts: Whether also what a button does, but for the start of the demo, which takes no id.
    """
    for one in built.blocks.fns.values():
        if one.fn is None or getattr(built.blocks.blocks.get(one.targets[0][0]), "value", None) == demo.START:
            continue
        names = list(inspect.signature(one.fn).parameters)
        if names[:1] != ["request"]:
            given: list[Any] = ["{}", asked(query), "{}"]
        elif not acts:
            continue
        else:
            event = [_Selected(text)] if "event" in names else []
            given = [gr.Request(client=None), *event, asked(query), *[text] * (len(one.inputs) - 1)]
        with warnings.catch_warnings(record=True) as notices:
            warnings.simplefilter("always")
            try:
                found = one.fn(*given)
                yield re.sub(
                    r'"nonce": "\w+"', "", repr(found[:-1] if isinstance(found, list) else found)
                )  # no digests
            except gr.Error as error:
                yield str(error)
        yield from (str(notice.message) for notice in notices)


class _Selected:
    """The first cell of a row whose cells are a text."""

    def __init__(self, text: str) -> None:
        self.index, self.row_value, self.value = (0, 0), [text] * 40, text
