"""The form of a tab: fields of a request, the button that submits it, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import gradio as gr

from nnxdsl.errors import RunError

from ...html import link
from ...markdown import plain
from ...processes.outputs_worker import Request
from ...state import Site
from ...view import Done, Query, Values, View
from ...words import duration
from .request import DEFAULTS, FIELDS, Chosen, asks, chosen, held_out_prompts, written

CHATS = (("formatted as in training", ""), ("a user message", "yes"), ("plain text", "no"))
NEEDED = {
    "generate": "a prompt: enter it, or choose a held-out row",
    "tokens": "a text: enter it, or choose a held-out row",
    "pairs": "held-out pairs",
    "chat": "a message",
    "checkpoints": "a prompt: enter it, or choose a held-out row",
}
NEXT = {
    "generate": "Enter a prompt or choose a held-out one, and press Generate. Both models sample with the same seed.",
    "tokens": "Choose a held-out row or enter a text: both models score it, and each token shows how much more likely "
    "it is under the policy.",
    "pairs": "Press Compute to see rewards and margins of every held-out pair.",
    "chat": "Enter a message: each model answers it, and sees its own answers in the turns after it.",
    "checkpoints": "Enter a prompt or choose a held-out one: the policy of every checkpoint answers it in turn.",
}
FIRST = (
    "The first request loads both models. A request with another prompt length, number of samples or max new tokens "
    "is compiled first; the same shapes are reused later."
)


class Form:
    """Fields of a tab's request. Nothing is computed in a read-only app: there it has no buttons."""

    def __init__(self, site: Site, view: View, tab: str, button: str, fields: Mapping[str, Any]) -> None:
        """Adds the button, and the text that tells how far the request is, below the fields.

        Args:
            site: State of the app.
            view: The page's view.
            tab: Name of the tab.
            button: Label of the button.
            fields: Components by their part of the query.
        """
        self.site, self._tab, self._fields = site, tab, fields
        self._buttons: list[gr.Button] = []
        if site.settings.read_only:
            gr.Markdown("Read-only: only cached results are shown.")
        else:
            with gr.Row():
                submit = gr.Button(button, variant="primary", scale=0, min_width=270)
                cancel = gr.Button("Cancel", visible=False, scale=0, min_width=120)
            texts = [field.submit for field in fields.values() if isinstance(field, gr.Textbox)]
            view.does(partial(gr.on, [submit.click, *texts]), self._submitted, list(fields.values()))
            view.does(cancel.click, self._cancelled)
            self._buttons = [cancel]
        self._status = gr.Markdown(elem_classes=["outputs-status"])

    @property
    def fields(self) -> list[Any]:
        """What `filled` changes."""
        return list(self._fields.values())

    @property
    def status(self) -> list[Any]:
        """What `told` changes."""
        return [self._status, *self._buttons]

    def filled(self, here: Chosen, query: Query) -> Values:
        """The fields with the values of a query."""
        if query.get("key"):
            found = self.site.answers.find(query["key"])
            texts = {} if found is None else {name: found.request.get(name, "") for name in ("prompt", "text")}
            query = {**query, **{name: text for name, text in texts.items() if text}}
        filled: dict[Any, Any] = {}
        for name, field in self._fields.items():
            if name not in FIELDS[self._tab]:
                continue  # not a part of the query
            value = query.get(name, DEFAULTS.get(name, ""))
            filled[field] = gr.update(value=_value(field, value))
            if name == "row":
                filled[field] = _rows(self.site, here, value)
        return filled

    def told(self, query: Query, found: Request | None) -> Values:
        """How far a request is; None if it was not submitted."""
        told: dict[Any, Any] = {self._status: self._words(query, found)}
        for button in self._buttons:
            told[button] = gr.update(visible=found is not None and not found.is_over)
        return told

    def _words(self, query: Query, found: Request | None) -> str:
        if found is None:
            if self.site.settings.read_only:
                return "This result is not cached, and a read-only app computes nothing."
            if query.get("key") or query.get("from"):
                return "The result of this link is not cached: press the button to compute it."
            return NEXT[self._tab]
        if not found.is_over:
            stage = "waiting for an earlier request" if found.state == "waiting" else found.stage or "starting"
            words = f"**{plain(stage[:1].upper() + stage[1:])}**, {duration(found.seconds)} so far."
            return f"{words} {FIRST}" if found.seconds < 20 else words
        if found.state == "cancelled":
            return "The request was cancelled."
        if found.result is None:
            lines = "\n".join(f"> {plain(line)}" for line in found.error.splitlines())
            return f"**The request failed.** Change it, or press the button to try again.\n\n{lines}"
        return f"Computed in {duration(found.seconds)} on {plain(str(found.result.get('device', '-')))}."

    def _submitted(self, query: Query, client: str, *values: Any) -> Done:
        here = attrs.evolve(chosen(self.site, query), tab=self._tab)
        if here.model is None:
            raise RunError("Choose a run that has a checkpoint.")
        texts = {name: _text(value) for name, value in zip(self._fields, values, strict=True)}
        given = self.given(query, texts)
        wanted = asks(self.site, here, given)
        if not wanted:
            return Done(f"This needs {NEEDED[self._tab]}.", is_problem=True)
        found = [self.site.answers.ask(model, one) for model, one in wanted][-1]
        return Done(query={**written(self._tab, given, found.key), "at": "", "pair": ""})

    def given(self, query: Query, texts: Mapping[str, str]) -> dict[str, str]:
        """The query of a submitted form: the texts of its fields, and what it leaves as it is."""
        unchanged = ("from", "side", "n") if self._tab == "tokens" else ()
        return {**texts, **{name: query[name] for name in unchanged if name in query}}

    def _cancelled(self, query: Query, client: str) -> Done:
        for one in requested(self.site, chosen(self.site, query), query):
            self.site.answers.cancel(one.key)
        return Done("Cancelled.")


def requested(site: Site, here: Chosen, query: Query) -> list[Request]:
    """The request of a query, of each of its models; without those that were not submitted.

    Raises:
        RunError: A part of the query is out of range.
    """
    found = [site.answers.find(site.answers.key(model, given)) for model, given in asks(site, here, query)]
    return [one for one in found if one is not None]


def prompt_fields(answer: gr.Textbox | None = None) -> dict[str, Any]:
    """Adds the fields of a prompt, and of an answer to it: a held-out row, or texts."""
    row = gr.Dropdown(
        [],
        label="Held-out row",
        info="Or a prompt of your own. The first hundred are listed; others are chosen by name",
        allow_custom_value=True,
    )
    with gr.Column() as own:
        with gr.Row():
            prompt = gr.Textbox(label="Prompt", lines=3, max_lines=12, scale=3)
            chat = gr.Dropdown(list(CHATS), value="", label="The prompt is", min_width=200)
        if answer is not None:
            answer.render()
    row.change(
        lambda chosen: gr.update(visible=not chosen),
        [row],
        [own],
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
    return {"row": row, "prompt": prompt, "chat": chat} | ({} if answer is None else {"text": answer})


SAMPLER = (
    ("temperature", "Temperature", "0 is greedy decoding"),
    ("top_k", "Top-k", "Empty for all tokens"),
    ("top_p", "Top-p", "Empty for all tokens"),
)
"""Numbers of each form that samples, for `number_fields`."""


def number_fields(*fields: tuple[str, str, str]) -> dict[str, Any]:
    """Adds numbers in a row, each of a part of the query, with a label and an explanation."""
    with gr.Row():
        return {name: gr.Number(label=label, info=info, min_width=150) for name, label, info in fields}


def save_buttons(*kinds: str) -> dict[str, gr.Button]:
    """Adds buttons in a row that download a result, by their kind of file."""
    with gr.Row():
        return {
            kind: gr.Button(f"Save as {kind.upper()}", link="#", size="sm", scale=0, min_width=140) for kind in kinds
        }


def saved(site: Site, buttons: Mapping[str, gr.Button], found: Request) -> Values:
    """What the buttons download."""
    path = site.settings.root + link("/download", outputs=found.key)
    return {button: gr.update(link=f"{path}&format={kind}") for kind, button in buttons.items()}


def _rows(site: Site, here: Chosen, chosen_row: str) -> Any:
    rows = [] if here.row is None else held_out_prompts(site, here.row.id)
    is_one_file = len({where.rpartition(":")[0] for where, _ in rows}) == 1
    choices = [("none: a prompt of your own", "")]
    choices += [(f"{where.rpartition(':' if is_one_file else '/')[2]}: {text}", where) for where, text in rows]
    if chosen_row and chosen_row not in [where for where, _ in rows]:
        choices.append((chosen_row, chosen_row))
    return gr.update(choices=choices, value=chosen_row, visible=len(choices) > 1)


def _value(field: Any, text: str) -> Any:
    """A part of a query as the value of a component; a number that is none is refused elsewhere."""
    if isinstance(field, gr.Checkbox):
        return text == "1"
    if isinstance(field, gr.Dropdown) and field.multiselect:
        return [one for one in text.split(",") if one]
    if isinstance(field, gr.Dropdown):
        return text if text in [value for _, value in field.choices] else ""
    if not isinstance(field, gr.Number):
        return text
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


def _text(value: Any) -> str:
    """The value of a component as a part of the query."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "1" if value else ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)
