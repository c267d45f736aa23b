"""A question before an action that cannot be undone: a group of components that a button reveals."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import attrs
import gradio as gr

from nnxdsl.errors import RunError

from ..markup import plain
from ..view import Done, Part, Query, Values, View

PARAMETER = "confirm"  # part of the query that says which question is asked


class Confirmation(Part):
    """A question with buttons that act or cancel, and a field where a name has to be typed.

    It is open while `?confirm=` is its name, so that a reloaded page asks again.
    """

    def __init__(
        self,
        view: View,
        button: gr.Button,
        name: str,
        question: str,
        act: Callable[[Query], Done | None],
        expected: Callable[[Query], str] = lambda query: "",
    ) -> None:
        """Adds the question `name` of the query, which a button reveals; `expected` has to be typed, unless empty."""
        self._name, self._act, self._expected = name, act, expected
        with gr.Group(visible=False, elem_classes=["question"]) as group:
            gr.Markdown(plain(question), padding=True)
            typed = gr.Textbox(visible=False, autofocus=True)
            with gr.Row():
                yes = gr.Button(str(button.value), variant="stop")
                no = gr.Button("Cancel")
        self._group, self._typed = group, typed
        view.write_query(button.click, PARAMETER, json.dumps(name))
        view.write_query(no.click, PARAMETER, '""')
        view.on(partial(gr.on, [yes.click, typed.submit]), self._acted, [typed])

    def fill(self, query: Query) -> Values:
        """Shows the question if the query names it."""
        expected = self._expected(query)
        return {
            self._group: gr.update(visible=query.get(PARAMETER) == self._name),
            self._typed: gr.update(label=f"Type {expected} to confirm", value="", visible=expected != ""),
        }

    def _acted(self, query: Query, typed: str | None) -> Done:
        expected = self._expected(query)
        if expected and (typed or "").strip() != expected:
            raise RunError(f"Type {expected} to confirm.")
        done = self._act(query) or Done()
        return attrs.evolve(done, query={PARAMETER: "", **done.query})
