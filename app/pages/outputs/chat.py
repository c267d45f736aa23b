"""The Chat tab: a conversation of several turns with two to four models, each of which sees its own answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import gradio as gr

from nnxdsl.errors import RunError

from ...markup import markdown_link, plain
from ...processes.outputs_worker import Model, Request
from ...processes.votes import SIDES
from ...state import Site
from ...view import Done, Query, Values, View
from .generate import beginnings, ended, other_of
from .request import Chosen, by_key, checkpoint_of, sampling, steps_of, with_checkpoints
from .tab import Tab

MOST_MORE = 2  # most checkpoints that chat beside the page's two models
MOST_TURNS = 16
Turns = list[tuple[dict[str, Any], Request | None]]
"""Requests of a model's turns with what came of them; after an unanswered turn there is none yet."""


class Speaker(NamedTuple):
    """A model that answers: the "policy" or the "other" side of two models of a child process."""

    model: Model
    side: str

    @property
    def heading(self) -> str:
        """Its name."""
        return other_of(self.model) if self.side == "other" else f"{self.model.run}, step {self.model.step:,}"


class Chat(Tab):
    """A conversation with two to four models."""

    name = "chat"
    title, button = "Chat", "Send"
    needs = "a message"
    hint = "Enter a message: each model answers it, and sees its own answers in the turns after it."
    is_result_above = True

    def __init__(self, site: Site, view: View) -> None:
        super().__init__(site, view)
        if not site.settings.read_only:
            with gr.Row():
                view.button(
                    "Take back the last turn", lambda query: Done(query=_turns(turns_of(site, query)[:-1])), size="sm"
                )
                view.button("Start over", lambda query: Done(query=_turns([])), size="sm")

    def _add_form(self) -> dict[str, Any]:
        with gr.Group():
            message = gr.Textbox(label="Message", info="A turn of the user", lines=2, max_lines=12)
            more = gr.Dropdown(
                [],
                multiselect=True,
                max_choices=MOST_MORE,
                label="Beside them",
                info="Policies of other checkpoints or runs, loaded one after another",
            )
            return {"message": message, "with": more, **self._add_numbers()}

    def _add_result(self, view: View) -> None:
        """Adds a column for each model: its name, its conversation, and facts of its last answer."""
        self._columns: list[tuple[gr.Column, gr.Markdown, gr.Chatbot, gr.Markdown]] = []
        with gr.Row(equal_height=False):
            for _ in range(len(SIDES) + MOST_MORE):
                with gr.Column(min_width=280) as column:
                    heading = gr.Markdown()
                    messages = gr.Chatbot(
                        show_label=False,
                        label="Conversation",
                        height=420,
                        render_markdown=False,
                        group_consecutive_messages=False,
                        buttons=["copy"],
                        feedback_options=None,
                        allow_file_downloads=False,
                    )
                    self._columns.append((column, heading, messages, gr.Markdown()))

    def fill_form(self, here: Chosen, query: Query) -> Values:
        """The choices of checkpoints, the numbers, and an empty message for the next turn."""
        choice, turn = _named(query), len(turns_of(self.site, query)) + 1
        names = dict.fromkeys([*self._checkpoints(here), *choice])
        return {
            **super().fill_form(here, query),
            self.fields["message"]: gr.update(value="", label=f"Message, turn {turn} of at most {MOST_TURNS}"),
            self.fields["with"]: gr.update(choices=list(names), value=choice),
        }

    def _to_submit(self, here: Chosen, query: Query) -> list[tuple[Model, dict[str, Any]]]:
        return [(one.model, request) for one, requests in self._conversations(here, query) for request, _ in requests]

    def _conversations(self, here: Chosen, query: Query) -> list[tuple[Speaker, Turns]]:
        """What each model has answered to the turns of the query."""
        return [(one, [*self._answers(one, query)]) for one in _speakers(self.site, here, query)]

    def _answers(self, speaker: Speaker, query: Query) -> Iterator[tuple[dict[str, Any], Request | None]]:
        settings, answers = sampling(query, self.site.settings.limits), self.site.answers
        messages: list[dict[str, str]] = []
        for turn in turns_of(self.site, query):
            messages = [*messages, {"role": "user", "content": turn}]
            request = {"do": "generate", "messages": messages, "sides": [speaker.side], **settings}
            answer = answers.find(answers.key(speaker.model, request))
            yield request, answer
            if answer is None or answer.result is None:
                return
            messages = [*messages, {"role": "assistant", "content": answer.result[speaker.side]["text"]}]

    def _submitted(self, here: Chosen, query: Query, texts: Mapping[str, str]) -> dict[str, str]:
        """The query with the message, if any, as its last turn; raises if a model has not answered all turns so far."""
        turns, message = turns_of(self.site, query), texts["message"].strip()
        if message:
            for speaker, conversation in self._conversations(here, {**query, "with": texts["with"]}):
                if sum(one is not None and one.result is not None for _, one in conversation) < len(turns):
                    raise RunError(
                        f"{speaker.heading} has not answered all turns so far: wait for it, or press Send without a "
                        "message to compute what is missing"
                    )
            turns = [*turns, message]
        return {**texts, **_turns(turns)}

    def fill_results(self, here: Chosen, query: Query) -> tuple[Request | None, Values]:
        """How far the last turn is, and the conversation of each model."""
        request, values = super().fill_results(here, query)
        conversations = [one for one in self._conversations(here, query) if one[1]]
        shown: dict[Any, Any] = {**values, self.result: gr.update(visible=bool(conversations))}
        for (column, heading, chat, facts), one in zip_longest(self._columns, conversations):
            shown[column] = gr.update(visible=one is not None)
            if one is not None:
                speaker, turns = one
                shown[heading] = f"### {plain(speaker.heading)}"
                label = f"Conversation with {speaker.heading}"
                shown[chat] = gr.update(value=[*_messages(speaker, turns)], label=label)
                shown[facts] = self._facts(speaker, turns[-1][1])
        return request, shown

    def _facts(self, speaker: Speaker, answer: Request | None) -> str:
        if answer is None:
            return "Not computed: press Send without a message."
        if answer.result is None and answer.is_over:
            return f"**{answer.state.capitalize()}**{f': {plain(answer.error)}' if answer.error else ''}"
        if answer.result is None:
            lengths = [f"{tokens} tokens so far" for _, tokens, _ in beginnings(answer, speaker.side)]
            return ", ".join([plain((answer.stage or answer.state).capitalize()), *lengths])
        reply, model = answer.result[speaker.side], speaker.model
        source = {"run": model.run, "step": model.step, "against": model.against, "from": answer.key}
        path = f"{self.site.settings.root}/outputs"
        tokens = markdown_link("Its tokens", path, **source, tab="tokens", side=speaker.side)
        return f"{reply['tokens']} tokens, {plain(ended(reply))}, {reply['seconds']:.2f} s. {tokens}"

    def _checkpoints(self, here: Chosen) -> list[str]:
        """Other steps of the run, and the newest step of other runs."""
        if here.row is None:
            return []
        checkpoints = [f"{here.row.id}@{step}" for step in (*here.steps, 0) if step != here.step]
        rows = [row for row in with_checkpoints(self.site) if row.id != here.row.id]
        return [*checkpoints, *(f"{row.id}@{steps_of(row.path)[0]}" for row in rows)]


def _speakers(site: Site, here: Chosen, query: Query) -> list[Speaker]:
    """The page's two models, then the checkpoints that `with` names; raises if they are too many, or none."""
    if here.model is None:
        return []
    names = _named(query)
    if len(names) > MOST_MORE:
        raise RunError(f"with: {len(names)} checkpoints; expected at most {MOST_MORE} beside the two of the page")
    models = {name: checkpoint_of(site, name) for name in names}
    for name in [name for name, model in models.items() if model is None]:
        raise RunError(f"with: {name[:100]} is not a run with this checkpoint, RUN@STEP")
    others = [Speaker(model, "policy") for model in models.values() if model is not None]
    return [*(Speaker(here.model, side) for side in SIDES), *others]


def _named(query: Query) -> list[str]:
    return list(dict.fromkeys(name for name in re.split(r"[,\n]", query.get("with", "")) if name))


def turns_of(site: Site, query: Query) -> list[str]:
    """The user's messages; empty for a text that is no list of texts; raises if they are too many, or too long."""
    if stored := by_key(site, "chat", query):
        return [one["content"] for one in stored.request["messages"] if one["role"] == "user"]
    try:
        turns = json.loads(query.get("turns") or "[]")
    except (ValueError, RecursionError):
        return []
    if not isinstance(turns, list) or not all(isinstance(one, str) for one in turns):
        return []
    limit = site.settings.limits.prompt_characters
    if len(turns) > MOST_TURNS or sum(map(len, turns)) > limit:
        raise RunError(f"turns: expected at most {MOST_TURNS} turns of {limit:,} characters in all")
    return turns


def _messages(speaker: Speaker, turns: Turns) -> Iterator[dict[str, str]]:
    for question, answer in turns:
        yield question["messages"][-1]
        if answer is None:
            continue
        if answer.result is not None:
            yield {"role": "assistant", "content": answer.result[speaker.side]["text"] or "(nothing)"}
        yield from ({"role": "assistant", "content": text} for text, _, _ in beginnings(answer, speaker.side))


def _turns(turns: Sequence[str]) -> dict[str, str]:
    return {"turns": json.dumps(list(turns), ensure_ascii=False) if turns else "", "key": ""}
