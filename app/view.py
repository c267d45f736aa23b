"""Connects the components of a page with the query of its URL: controls, what fills them, and actions.

The state of a page is its query alone: what a user chooses is written into it, and what is shown is computed from it,
so that a reloaded or shared URL shows the same. Values that did not change are not sent again: text stays selected.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import parse_qsl

import attrs
import gradio as gr
import pandas as pd
import plotly.graph_objects as go
from gradio.blocks import Block
from gradio.components import Component

from nnxdsl.errors import NnxdslError

from .client import CLIENT
from .markup import plain

QUERY_CHARACTERS = 4_000
EVERY = "*"  # instead of the name of a control: all of them are left as they are
UNQUEUED: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
"""Options of events that a script or a short function answers."""

NARROW = 800  # width of a window, in pixels, below which charts stand one below the other
Query = Mapping[str, str]
Values = Mapping[Any, Any]  # of components, columns, rows, tabs


@attrs.frozen
class Done:
    """What an action did."""

    notice: str = ""  # for the user, as plain text
    is_problem: bool = False  # whether it says why nothing was done
    goto: str | None = None  # path of the app to open
    query: Mapping[str, str] = attrs.Factory(dict)  # parts to write; an empty text removes one


class View:
    """Components that show what the URL's query says, controls that change it, and actions."""

    def __init__(self) -> None:
        self._query = gr.Textbox(visible="hidden", label="query")
        self._done = gr.Textbox(visible="hidden", label="done")
        self._changed = gr.Textbox(visible="hidden", label="changed")
        self._controls: dict[str, Block] = {}
        self._initial: dict[str, str] = {}
        self._problems = gr.Column()
        self._done.change(None, [self._done], [self._changed], js="(done) => nnx.done(done)", **UNQUEUED)

    def control(self, name: str, component: Component, initial: str = "") -> Any:
        """Returns a component whose value is the part `name` of the query; without it, it is `initial`."""
        self._controls[name], self._initial[name] = component, initial
        # `input` of a Textbox comes with a key alone, not when text is pasted. A `change` comes also when the page
        # sets its value, which then equals the query's.
        trigger = component.change if isinstance(component, gr.Textbox) else component.input  # type: ignore[attr-defined]
        written = f"nnx.set({json.dumps(name)}, value, {json.dumps(initial)})"
        trigger(None, [component], [self._changed], js=f"(value) => {written}", **UNQUEUED)
        return component

    def tabs(self, name: str, tabs: gr.Tabs) -> gr.Tabs:
        """Returns tabs whose selected one, by its `id`, is the part `name` of the query, or else the first."""
        ids = [str(tab.id) for tab in tabs.children]  # type: ignore[attr-defined]
        self._controls[name] = tabs
        for tab, chosen in zip(tabs.children, ids, strict=True):
            # The first tab tells that it is selected when the page opens, before the query's one is.
            opened = f"new URLSearchParams(location.search).get({json.dumps(name)}) ?? {json.dumps(ids[0])}"
            selected = f"nnx.isUsed ? {json.dumps(chosen)} : {opened}"
            self.write_query(tab.select, name, selected, ids[0])  # type: ignore[attr-defined]
        return tabs

    def write_query(self, trigger: Any, name: str, script: str, initial: str = "") -> None:
        """Writes the value of a JavaScript expression into the part `name` of the query when something is triggered."""
        written = f"nnx.set({json.dumps(name)}, {script}, {json.dumps(initial)})"
        trigger(None, None, [self._changed], js=f"() => {written}", **UNQUEUED)

    def controls_besides(self, components: Sequence[Block]) -> list[Block]:
        """The controls that are not among components."""
        return [self._controls[name] for name in self._initial if self._controls[name] not in components]

    def with_chosen(self, query: Query, values: Values) -> Values:
        """Values with what the query says of each control that they give no value."""
        result = dict(values)
        for name, initial in self._initial.items():
            control, text = self._controls[name], query.get(name, initial)
            update = result.get(control, gr.update())
            if isinstance(update, dict) and "value" not in update:
                choices = update.get(
                    "choices", control.choices if isinstance(control, gr.Dropdown | gr.Radio) else None
                )
                allowed = None if choices is None else [one[1] if isinstance(one, tuple) else one for one in choices]
                if isinstance(control, gr.Checkbox):
                    result[control] = {**update, "value": text == "1"}
                elif allowed is None or text in allowed or initial in allowed:
                    result[control] = {**update, "value": text if allowed is None or text in allowed else initial}
        return result

    def on_change(self, text: gr.Textbox, script: str) -> None:
        """Passes a text to a JavaScript function whenever it changes, then shows the page anew."""
        shows = "return JSON.stringify({ count: ++nnx.count });"
        text.change(None, [text], [self._changed], js=f"(text) => {{ {script}(text); {shows} }}", **UNQUEUED)

    def refresh(
        self, fill: Callable[[Query], Values], components: Sequence[Block], timer: gr.Timer | None = None
    ) -> None:
        """Fills components with what `fill` returns: when the page opens, when a control changes, and after actions.

        An `NnxdslError` is shown at the top of the page, and what is shown else is left as it is. A timer, which may be
        among the components, fills again those that are not controls.
        """
        sent = gr.Textbox(visible="hidden", label="digests")
        with self._problems:
            problem = gr.Markdown(visible=False, elem_classes=["problem"])
        shown = [*components, problem]
        handler = _handler(fill, shown, self._controls)
        for trigger, begin in (
            (gr.context.Context.root_block.load, "'{}'"),  # type: ignore[union-attr]
            (self._changed.change, "changed"),
            *([] if timer is None else [(timer.tick, json.dumps(json.dumps({"name": EVERY})))]),
        ):
            again = "'{}'" if begin == "'{}'" else "sent"
            trigger(
                handler,
                [self._changed, self._query, sent],
                [*shown, sent],
                js=f"(changed, _, sent) => [{begin}, nnx.query(), {again}]",
                trigger_mode="always_last",
                **UNQUEUED,
            )

    def button(
        self, text: str, act: Callable[..., Done | None] | None = None, inputs: Sequence[Component] = (), **options: Any
    ) -> gr.Button:
        """Returns a button as wide as its text, that does what `on` describes."""
        button = gr.Button(text, **{"scale": 0, **options})
        if act is not None:
            self.on(button.click, act, inputs)
        return button

    def on(
        self,
        trigger: Any,
        function: Callable[..., Done | None],
        inputs: Sequence[Component] = (),
        *,
        has_event: bool = False,
    ) -> None:
        """Calls a function when something is triggered (`button.click`), then shows its notice and the page anew.

        The function takes the query, with `has_event` the `gr.SelectData` of what was selected, and the values of the
        inputs; `CLIENT` is who asks for it. An `NnxdslError` is shown as a notice. In a read-only app, actions that
        write must not be built at all: what is built can be called.
        """

        def handle(request: gr.Request, query: str, *values: Any) -> str:
            CLIENT.set(client_of(request))
            try:
                done = function(_parsed(query), *values) or Done()
            except Exception as error:
                raise gr.Error(escape(_message(error)).replace("\n", "<br>"), print_exception=False) from error
            if done.notice:  # as HTML
                (gr.Warning if done.is_problem else gr.Info)(escape(done.notice).replace("\n", "<br>"))
            return json.dumps({"goto": done.goto, "query": dict(done.query), "nonce": secrets.token_hex(4)})

        def handle_event(request: gr.Request, event: gr.SelectData, query: str, *values: Any) -> str:
            return handle(request, query, event, *values)

        names = "".join(f", value{number}" for number in range(len(inputs)))
        trigger(
            handle_event if has_event else handle,
            [self._query, *inputs],
            [self._done],
            js=f"(_{names}) => [nnx.query(){names}]",
            show_progress="hidden",
            concurrency_limit=None,
            api_visibility="private",
        )


class Part:
    """Components of a page that are filled together."""

    @property
    def components(self) -> list[Block]:
        """The components that `fill` may change: all attributes, also those of parts and those in collections."""
        return list(dict.fromkeys(_blocks(vars(self).values())))


def _blocks(values: Iterable[object]) -> Iterator[Block]:
    for value in values:
        if isinstance(value, Block):
            yield value
        elif isinstance(value, Part):
            yield from value.components
        elif isinstance(value, dict):
            yield from _blocks(value.values())
        elif isinstance(value, list | tuple):
            yield from _blocks(value)


def client_of(request: gr.Request | None) -> str:
    """The address of a client, for the audit log and the limit of its jobs; empty without a request."""
    return getattr(request.client, "host", "") if request and request.client else ""


def if_any(value: Any, **more: Any) -> dict[str, Any]:
    """An update with a text or a table, visible if it is not empty."""
    return gr.update(value=value, visible=value is not None and len(value) > 0, **more)


def is_narrow(query: Query) -> bool:
    """Whether the window that shows a page is narrow."""
    width = query.get("_width", "")
    return width.isdecimal() and len(width) < 6 and int(width) < NARROW


def _handler(
    fill: Callable[[Query], Values], outputs: list[Block], controls: Mapping[str, Block]
) -> Callable[..., list[Any]]:
    """What gradio calls: returns outputs whose values changed, but for the control that the user changed."""
    problem = outputs[-1]

    def handle(changed: str, query: str, sent: str, request: gr.Request | None = None) -> list[Any]:
        CLIENT.set(client_of(request))
        try:
            values = {problem: gr.update(visible=False, value=""), **fill(_parsed(query))}
        except Exception as error:
            values = {problem: gr.update(visible=True, value=f"**{plain(_message(error))}**")}
        name = str(json_object(changed).get("name", ""))
        left = set(controls.values()) if name == EVERY else {controls.get(name)}
        digests = json_object(sent)
        answer: list[Any] = []
        for place, output in enumerate(outputs):
            value = values.get(output)
            digest = None if output not in values else _digest(value)
            is_new = digest is not None and digest != digests.get(str(place)) and output not in left
            answer.append(value if is_new else gr.skip())
            if is_new:
                digests[str(place)] = digest
            elif output in left and name != EVERY:  # the user's value, which it has already; choices are sent later
                digests[str(place)] = None if isinstance(value, dict) and "choices" in value else digest
        return [*answer, json.dumps(digests)]

    return handle


def _message(error: Exception) -> str:
    """What the user is told; errors of the app itself are printed as well."""
    if isinstance(error, NnxdslError):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    return f"Internal error of the app ({type(error).__name__}: {error}). Runs are not affected."


def _parsed(query: str) -> dict[str, str]:
    return dict(parse_qsl(query.lstrip("?")[:QUERY_CHARACTERS]))


def json_object(text: str) -> dict[str, Any]:
    """A JSON object that a browser sends; an empty one for any other text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _digest(value: object) -> str:
    def text(each: object) -> str:
        if isinstance(each, go.Figure):
            return each.to_json() or ""
        is_table = isinstance(each, pd.DataFrame)
        return (each.to_json(orient="split", default_handler=str) or "") if is_table else repr(each)

    return hashlib.blake2b(json.dumps(value, default=text).encode(), digest_size=8).hexdigest()
