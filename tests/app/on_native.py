"""What is asked of a built page of gradio components: its updates as they are sent, its buttons, and its actions."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

import gradio as gr

from tests.app.native import Built

NAMED = (gr.Dropdown, gr.Radio, gr.Checkbox, gr.Textbox)


def asked(query: dict[str, str]) -> str:
    return "?" + urllib.parse.urlencode(query)


def updates(built: Built, **query: str) -> dict[str, Any]:
    """What is sent for a query, by the component's label where it has one, or else by its class."""
    load, result = built.handler("load"), {}
    for component, value in zip(load.outputs, load.fn("{}", asked(query), "{}"), strict=True):
        name = (component.label if isinstance(component, NAMED) else None) or type(component).__name__
        result[f"{name} {sum(key.startswith(name) for key in result)}" if name in result else name] = value
    return result


def built_buttons(built: Built) -> set[str]:
    """All buttons that a page could show."""
    return {str(one.value) for one in built.blocks.blocks.values() if isinstance(one, gr.Button)}


def offered(built: Built, **query: str) -> dict[str, str | None]:
    """The buttons that a page shows for a query, with what those lead to that are links."""
    load, result = built.handler("load"), {}
    for component, value in zip(load.outputs, load.fn("{}", asked(query), "{}"), strict=True):
        if isinstance(component, gr.Button) and isinstance(value, dict) and value.get("visible", "link" in value):
            result[str(component.value)] = value.get("link")
    return result


def click(built: Built, text: str, *values: Any, **query: str) -> dict[str, Any]:
    """Clicks the last button with a text that does something; returns what it writes and opens."""
    by_id = built.blocks.blocks
    functions = [
        one.fn
        for one in built.blocks.fns.values()
        if one.fn is not None and one.targets[0][1] == "click" and by_id[one.targets[0][0]].value == text
    ]
    return json.loads(functions[-1](gr.Request(client=None), asked(query), *values))
