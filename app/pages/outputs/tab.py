"""A tab of the Outputs page: the form of a request, the button that submits it, how far it is, and its result."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import gradio as gr

from nnxdsl.errors import RunError

from ...formatting import duration, sentence
from ...markup import link, plain
from ...page import Part
from ...processes.outputs_worker import Model, Request
from ...state import Site
from ...view import UNQUEUED, Done, Query, Values, View
from .request import (
    BETWEEN,
    FIELDS,
    Chosen,
    chosen,
    held_out_prompts,
    number,
    numbers,
    request,
    requests,
    written,
)

CHATS = (("formatted as in training", ""), ("a user message", "yes"), ("plain text", "no"))
FIRST = (
    "The first request loads both models. A request with another prompt length, number of samples or max new tokens "
    "is compiled first; the same shapes are reused later."
)


class Tab(Part):
    """Components of a tab. Nothing is computed in a read-only app: there it has no buttons.

    A subclass says its name in the query, the labels of the tab and of its button, what an incomplete form lacks, and
    what to do in an empty tab, and whether it takes several prompts; it adds and fills the components of a result.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    button: ClassVar[str]
    needs: ClassVar[str] = "a prompt: enter it, or choose a held-out row"
    hint: ClassVar[str]
    is_result_above: ClassVar[bool] = False
    has_many: ClassVar[bool] = False

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        self.cancels: list[gr.Button] = []
        if self.is_result_above:
            self._add_result_column(view)
        self.fields = self._add_form()
        if site.settings.read_only:
            gr.Markdown("Read-only: only cached results are shown.")
        else:
            with gr.Row():
                submit = gr.Button(self.button, variant="primary", scale=0, min_width=270)
                self.cancels = [gr.Button("Cancel", visible=False, scale=0, min_width=120)]
            texts = [field.submit for field in self.fields.values() if isinstance(field, gr.Textbox)]
            view.on(partial(gr.on, [submit.click, *texts]), self._submit, list(self.fields.values()))
        self._status = gr.Markdown(elem_classes=["outputs-status"])
        if not self.is_result_above:
            self._add_result_column(view)

    def _add_form(self) -> dict[str, Any]:
        """Adds the fields of the form, and returns them by their parts of the query."""
        with gr.Group() as self.form:
            names = FIELDS[self.name]
            fields = prompt_fields(has_answer="text" in names, has_many=self.has_many) if "row" in names else {}
            return fields | self._add_numbers()

    def _add_numbers(self) -> dict[str, Any]:
        fields = {name: one for name, one in numbers(self.site.settings.limits).items() if name in FIELDS[self.name]}
        with gr.Row(visible=bool(fields)):
            return {
                name: gr.Number(label=one.label, info=one.info.format(high=one.high), min_width=150)
                for name, one in fields.items()
            }

    def _add_result_column(self, view: View) -> None:
        with gr.Column(visible=False) as self.result:
            self._add_result(view)

    def _add_result(self, view: View) -> None:
        raise NotImplementedError

    def _values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        """What requests show, at least one of which has a result or the beginnings of answers."""
        return {}

    def _to_submit(self, here: Chosen, query: Query) -> list[tuple[Model, dict[str, Any]]]:
        """What the query asks of which models; empty if it is incomplete, raises if a part of it is out of range."""
        if here.model is None:
            return []
        submitted = requests(self.site, self.name, query) if self.has_many else [request(self.site, self.name, query)]
        return [(here.model, one) for one in submitted if one is not None]

    def requested(self, here: Chosen, query: Query) -> list[Request]:
        """The requests of a query; without those that were not submitted."""
        stored = [self.site.answers.find(self.site.answers.key(*one)) for one in self._to_submit(here, query)]
        return [one for one in stored if one is not None]

    def fill_form(self, here: Chosen, query: Query) -> Values:
        """The fields with the values of a query."""
        if query.get("key"):
            stored = [one.request for one in map(self.site.answers.find, query["key"].split(",")) if one is not None]
            texts = {name: BETWEEN.join(one[name] for one in stored if one.get(name)) for name in ("prompt", "text")}
            query = {**query, **{name: text for name, text in texts.items() if text}}
        filled = {field: gr.update(value=self._value(query, name)) for name, field in self.fields.items()}
        if "row" in self.fields:
            filled[self.fields["row"]] = _rows(self.site, here, query.get("row", ""), has_many=self.has_many)
        return filled

    def _value(self, query: Query, name: str) -> Any:
        """A part of a query as the value of its field; a number that is none is refused elsewhere."""
        field, text = self.fields[name], query.get(name, "")
        if isinstance(field, gr.Number):
            with contextlib.suppress(RunError):
                return number(query, name, self.site.settings.limits)
            return None
        if isinstance(field, gr.Checkbox):
            return text == "1"
        is_offered = not isinstance(field, gr.Dropdown) or text in [value for _, value in field.choices]
        return text if is_offered else ""

    def fill_results(self, here: Chosen, query: Query) -> tuple[Request | None, Values]:
        """The request that is under way, or else the first one; how far it is, with what is there of the results."""
        requests = self.requested(here, query)
        pending = [one for one in requests if not one.is_over]
        shown = [one for one in requests if one.result is not None or one.so_far]
        request = next(iter(pending or shown or requests), None)
        status = self._status_text(query, request)
        if pending and len(requests) > 1:
            status += f" {len(requests) - len(pending)} of {len(requests)} are complete."
        values: dict[Any, Any] = {self._status: status}
        values[self.result] = gr.update(visible=bool(shown))
        values |= {button: gr.update(visible=bool(pending)) for button in self.cancels}
        return request, {**values, **(self._values(here, requests, query) if shown else {})}

    def _status_text(self, query: Query, request: Request | None) -> str:
        if request is None:
            if self.site.settings.read_only:
                return "This result is not cached, and a read-only app computes nothing."
            if query.get("key") or query.get("from"):
                return "The result of this link is not cached: press the button to compute it."
            return self.hint
        if not request.is_over:
            stage = "waiting for an earlier request" if request.state == "waiting" else request.stage or "starting"
            text = f"**{plain(sentence(stage))}**, {duration(request.seconds)} so far."
            return f"{text} {FIRST}" if request.seconds < 20 else text
        if request.state == "cancelled":
            return "The request was cancelled."
        if request.result is None:
            lines = "\n".join(f"> {plain(line)}" for line in request.error.splitlines())
            return f"**The request failed.** Change it, or press the button to try again.\n\n{lines}"
        return f"Computed in {duration(request.seconds)} on {plain(str(request.result.get('device', '-')))}."

    def _submit(self, query: Query, *values: Any) -> Done:
        here = chosen(self.site, query)
        if here.model is None:
            raise RunError("Choose a run that has a checkpoint.")
        submitted = self._submitted(
            here, query, {name: _text(one) for name, one in zip(self.fields, values, strict=True)}
        )
        asks = self._to_submit(here, submitted)
        if not asks:
            return Done(f"This needs {self.needs}.", is_problem=True)
        keys = [self.site.answers.ask(*one).key for one in asks]
        named = ",".join(keys if self.has_many else keys[-1:])
        return Done(query={**written(self.name, submitted, named), "at": "", "pair": ""})

    def _submitted(self, here: Chosen, query: Query, texts: Mapping[str, str]) -> dict[str, str]:
        """The query of a submitted form: the texts of its fields, and what it leaves as it is."""
        return dict(texts)


def prompt_fields(*, has_answer: bool, has_many: bool) -> dict[str, Any]:
    """Adds the fields of a prompt, and of an answer to it: a held-out row, or texts, which hide if a row is chosen."""
    row = gr.Dropdown(
        [],
        label="Held-out rows" if has_many else "Held-out row",
        info="Or a prompt of your own. The first hundred are listed; others are chosen by name",
        allow_custom_value=True,
        multiselect=has_many,
    )
    with gr.Column() as column:
        with gr.Row():
            hint = "Several prompts: a line --- between two of them" if has_many else None
            prompt = gr.Textbox(label="Prompt", placeholder=hint, lines=3, max_lines=12, scale=3)
            chat = gr.Dropdown(list(CHATS), value="", label="The prompt is", min_width=200)
        fields = {"row": row, "prompt": prompt, "chat": chat}
        if has_answer:
            fields["text"] = gr.Textbox(label="Answer", info="Scored after the prompt", lines=3, max_lines=12)
    row.change(lambda chosen: gr.update(visible=not chosen), [row], [column], **UNQUEUED)
    return fields


def save_buttons(*kinds: str) -> dict[str, gr.Button]:
    """Adds buttons in a row that download a result, by their kind of file."""
    with gr.Row():
        return {
            kind: gr.Button(f"Save as {kind.upper()}", link="#", size="sm", scale=0, min_width=140) for kind in kinds
        }


def saved(site: Site, buttons: Mapping[str, gr.Button], *requests: Request) -> Values:
    """What the buttons download."""
    path = site.settings.root + link("/download", outputs=",".join(one.key for one in requests))
    return {button: gr.update(link=f"{path}&format={kind}") for kind, button in buttons.items()}


def _rows(site: Site, here: Chosen, value: str, *, has_many: bool) -> Any:
    rows = [] if here.row is None else held_out_prompts(site, here.row.id)
    is_one_file = len({where.rpartition(":")[0] for where, _ in rows}) == 1
    names = [name for name in value.split("\n") if name]
    choices = [] if has_many else [("none: a prompt of your own", "")]
    choices += [(f"{where.rpartition(':' if is_one_file else '/')[2]}: {text}", where) for where, text in rows]
    choices += [(name, name) for name in names if name not in dict(rows)]
    return gr.update(choices=choices, value=names if has_many else value, visible=bool(rows or names))


def _text(value: Any) -> str:
    """The value of a component as a part of the query."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, bool):
        return "1" if value else ""
    return "" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)
