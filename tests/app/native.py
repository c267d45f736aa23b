"""A page of gradio components without a browser: what it shows for a query of its URL."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gradio as gr
import pandas as pd
from gradio.routes import App

from app.pages.demo import START
from app.state import Site


class Built:
    """A page whose handlers are called as gradio would call them."""

    def __init__(self, page: Callable[[Site], object], site: Site) -> None:
        async def build() -> gr.Blocks:  # without a running loop gradio makes several, and closes none
            with gr.Blocks() as blocks:
                self.page: Any = page(site)
            return blocks

        # In a thread of its own: playwright's loop may run in this one.
        with patch.object(App, "create_app"), ThreadPoolExecutor(1) as pool:  # most of the time, and nothing is served
            self.blocks = pool.submit(asyncio.run, build()).result()

    def handler(self, kind: str) -> Any:
        """The handler of the first event of a kind, such as `load`."""
        return next(one for one in self.blocks.fns.values() if one.targets[0][1] == kind)

    def shown(self, changed: str = "{}", /, **query: str) -> dict[str, Any]:
        """The values of the page's components for a query, by their label where they have one, or else by class.

        `changed` is what the script of the page tells of a changed control, or of the timer.
        """
        values: dict[str, Any] = {}
        names: dict[Any, str] = {}
        loads = [one for one in self.blocks.fns.values() if one.targets[0][1] == "load"]
        for load in [one for one in loads if len(one.inputs) == 3]:  # those of `View.refresh`
            result = load.fn(changed, "?" + urllib.parse.urlencode(query), "{}")
            for component, value in zip(load.outputs, result, strict=True):
                if (
                    component in names and isinstance(value, dict) and value == gr.skip()
                ):  # another function has filled it
                    continue
                name = component.label if isinstance(component, gr.Dropdown | gr.Radio) else type(component).__name__
                name = f"{name} {sum(key.startswith(name) for key in values)}" if name in values else name
                name = names.setdefault(component, name)
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


def answers(
    blocks: gr.Blocks, query: dict[str, str], run: str, *, writes: bool, text: str | None = None
) -> Iterator[tuple[str, str]]:
    """What every function of an app answers to a query, as text; those that write if they are asked for.

    Args:
        blocks: The app.
        query: The query of the URL.
        run: The run in calls of programs.
        writes: Whether buttons are pressed and programs call.
        text: Text of every field; None for the run.
    """
    asked, request = "?" + urllib.parse.urlencode(query), SimpleNamespace(client=None)
    for one in blocks.fns.values():
        labels = [component.label for component in one.inputs if hasattr(component, "label")]
        name = f"{one.targets[0][1] if one.targets else 'api'} {one.api_name}"
        if one.fn is None or (one.targets and getattr(blocks.blocks.get(one.targets[0][0]), "value", None) == START):
            continue  # the demo takes no id
        if labels == ["changed", "query", "digests"]:
            if name.startswith("load"):
                yield name, _text(lambda call=one.fn: call("{}", asked, "{}")[:-1])  # without digests
        elif writes and labels[:1] == ["query"]:
            word = run if text is None else text
            fields = [word if isinstance(field, gr.Textbox) else field.value for field in one.inputs[1:]]
            event = [SimpleNamespace(index=(0, 0), row_value=[word] * 20, value=word)] if _has_event(one.fn) else []
            yield name, _text(lambda call=one.fn, inputs=(request, *event, asked, *fields): call(*inputs))
        elif writes and not one.targets:
            parameters = inspect.signature(one.fn).parameters
            known = {"request": request, "run": run, "experiment": run if text is None else text, "prompt": "x"}
            options = {key: value for key, value in known.items() if key in parameters}
            yield name, _text(lambda call=one.fn, kwargs=options: call(**kwargs))


def _has_event(call: Any) -> bool:
    return "event" in inspect.signature(call).parameters


def _text(call: Callable[[], object]) -> str:
    """All that a browser would be shown, notices among it."""
    with warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("always")
        try:
            result = call()
        except gr.Error as error:
            result = error.message
    values = [*result, *(str(one.message) for one in noticed)] if isinstance(result, list) else [result, noticed]
    text = "\n".join(value.to_json() if hasattr(value, "to_json") else _shown(value) for value in values)
    return re.sub(r'"nonce": "\w+"|0x[0-9a-f]+|\d+ s so far', "", text)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(_shown(each) for each in value.values())
    return value.to_json() if isinstance(value, pd.DataFrame) else str(value)
