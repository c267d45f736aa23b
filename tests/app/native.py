"""A page of gradio components without a browser: what it shows for a query of its URL."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from types import SimpleNamespace
from typing import Any

import gradio as gr

from app.page import GradioPage
from app.state import Site


class Built:
    """A page whose handlers are called as gradio would call them."""

    def __init__(self, page: GradioPage, site: Site) -> None:
        async def build() -> gr.Blocks:  # without a running loop gradio makes several, and closes none
            with gr.Blocks() as blocks:
                page.build(site)
            return blocks

        self.blocks = asyncio.run(build())

    def handler(self, kind: str) -> Any:
        """The handler of the first event of a kind, such as `load`."""
        return next(one for one in self.blocks.fns.values() if one.targets[0][1] == kind)

    def shown(self, **query: str) -> dict[str, Any]:
        """The values of the page's components for a query, by their label where they have one, or else by class."""
        values: dict[str, Any] = {}
        loads = [one for one in self.blocks.fns.values() if one.targets[0][1] == "load"]
        for load in [one for one in loads if len(one.inputs) == 3]:  # those of `View.shows`
            found = load.fn("{}", "?" + urllib.parse.urlencode(query), "{}")
            for component, value in zip(load.outputs, found, strict=True):
                name = component.label if isinstance(component, gr.Dropdown | gr.Radio) else type(component).__name__
                name = f"{name} {sum(key.startswith(name) for key in values)}" if name in values else name
                values[name] = value["value"] if isinstance(value, dict) and "value" in value else value
        return values

    def pressed(self, button: str, query: dict[str, str], *values: Any) -> dict[str, Any]:
        """Presses a button, with the values of its fields; returns what is written into the query and what is opened.

        Notices are printed, or warned of.
        """
        asked = "?" + urllib.parse.urlencode(query)
        for one in self.blocks.fns.values():
            number, kind = one.targets[0]
            if kind == "click" and getattr(self.blocks.blocks[number], "value", None) == button:
                return json.loads(one.fn(SimpleNamespace(client=None), asked, *values))
        raise AssertionError(f"there is no button {button}")

    @property
    def buttons(self) -> list[str]:
        """The buttons that were built."""
        return [one.value for one in self.blocks.blocks.values() if isinstance(one, gr.Button)]
