"""The Chat tab: a conversation of several turns with two to four models, each of which sees its own answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from nnxdsl.errors import RunError

from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...processes.outputs_worker import Request
from ...state import Site
from ...store.run_paths import directory_path
from ...view import Done, Query, Values, View
from .forms import SAMPLER, Form, number_fields
from .generate import called, ended
from .request import (
    MOST_MORE,
    MOST_TURNS,
    Chosen,
    Speaker,
    chosen,
    conversation,
    speakers,
    steps_of,
    turns_of,
    with_checkpoints,
)

COLUMNS = 2 + MOST_MORE


class ChatForm(Form):
    """The form of a turn: its message is added to those of the query."""

    def given(self, query: Query, texts: Mapping[str, str]) -> dict[str, str]:
        """The query with the message as its last turn; without a message, the same turns.

        Raises:
            RunError: A model has not answered all turns so far.
        """
        turns, message = turns_of(self.site, query), texts["message"].strip()
        if message:
            here = chosen(self.site, query)
            for speaker in speakers(self.site, here, {**query, "with": texts["with"]}):
                answers = conversation(self.site, speaker, query)
                if turns and (len(answers) < len(turns) or not _has_result(answers[-1][1])):
                    raise RunError(
                        f"{heading(speaker)} has not answered all turns so far: wait for it, or press Send without a "
                        "message to compute what is missing"
                    )
            turns = [*turns, message]
        return {**texts, "turns": json.dumps(turns, ensure_ascii=False) if turns else ""}


class Chat:
    """Components of the tab."""

    def __init__(self, site: Site, view: View) -> None:
        """Adds the components."""
        self._site = site
        with gr.Column(visible=False) as self.found, gr.Row(equal_height=False):
            self._columns = [_Column() for _ in range(COLUMNS)]
        with gr.Group():
            message = gr.Textbox(label="Message", info="A turn of the user", lines=2, max_lines=12)
            more = gr.Dropdown(
                [],
                multiselect=True,
                max_choices=MOST_MORE,
                label="Beside them",
                info="Policies of other checkpoints or runs, loaded one after another",
            )
            fields: dict[str, Any] = {"message": message, "with": more}
            fields |= number_fields(
                ("max", "Max new tokens", f"Of each turn, at most {site.settings.limits.new_tokens:,}"),
                *SAMPLER,
                ("seed", "Seed", "The same for all models"),
            )
        self._message, self._more = message, more
        self.form = ChatForm(site, view, "chat", "Send", fields)
        if not site.settings.read_only:
            with gr.Row():
                view.does(gr.Button("Take back the last turn", size="sm", scale=0).click, self._taken_back)
                view.does(gr.Button("Start over", size="sm", scale=0).click, lambda query, client: _turns([]))
        self.outputs = [self.found, *(part for column in self._columns for part in column.outputs)]

    def filled(self, here: Chosen, query: Query) -> Values:
        """The choices of checkpoints; an empty message for the next turn."""
        given = [name for name in query.get("with", "").split(",") if name]
        names = dict.fromkeys([*self._checkpoints(here), *given])
        turns = turns_of(self._site, query)
        return {
            self._message: gr.update(value="", label=f"Message, turn {len(turns) + 1} of at most {MOST_TURNS}"),
            self._more: gr.update(choices=list(names), value=given),
        }

    def values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        """The conversation of each model."""
        turns, there = turns_of(self._site, query), speakers(self._site, here, query)
        values: dict[Any, Any] = {self.found: gr.update(visible=bool(turns))}
        for place, column in enumerate(self._columns):
            speaker = there[place] if place < len(there) else None
            answers = [] if speaker is None else conversation(self._site, speaker, query)
            values |= column.values(speaker, turns, [answer for _, answer in answers], self._site.settings.root)
        return values

    def _checkpoints(self, here: Chosen) -> list[str]:
        """Other steps of the run, and the newest step of other runs."""
        if here.row is None:
            return []
        own = [f"{here.row.id}@{step}" for step in (*here.steps, 0) if step != here.step]
        rows = [row for row in with_checkpoints(self._site) if row.id != here.row.id]
        return [*own, *(f"{row.id}@{steps_of(directory_path(self._site.settings.home, row.id))[0]}" for row in rows)]

    def _taken_back(self, query: Query, client: str) -> Done:
        return _turns(turns_of(self._site, query)[:-1])


class _Column:
    """One model's side of the conversation."""

    def __init__(self) -> None:
        with gr.Column(min_width=280) as self._column:
            self._heading = gr.Markdown()
            self._chat = gr.Chatbot(
                show_label=False,
                label="Conversation",
                height=420,
                render_markdown=False,
                group_consecutive_messages=False,
                buttons=["copy"],
                feedback_options=None,
                allow_file_downloads=False,
            )
            self._facts = gr.Markdown()
        self.outputs = [self._column, self._heading, self._chat, self._facts]

    def values(
        self, speaker: Speaker | None, turns: Sequence[str], answers: Sequence[Request | None], root: str
    ) -> Values:
        if speaker is None:
            return {self._column: gr.update(visible=False)}
        messages: list[dict[str, str]] = []
        facts = ""
        for turn, answer in zip(turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            facts = _state(answer)
            if answer is not None and answer.result is not None:
                reply = answer.result[speaker.side]
                messages.append({"role": "assistant", "content": reply["text"] or "(nothing)"})
                facts = f"{reply['tokens']} tokens, {plain(ended(reply))}, {reply['seconds']:.2f} s. "
                place = {"run": speaker.model.run, "step": str(speaker.model.step), "against": speaker.model.against}
                tokens = link("/outputs", **place, tab="tokens", **{"from": answer.key}, side=speaker.side)
                facts += markdown_link("Its tokens", root + tokens)
        return {
            self._column: gr.update(visible=True),
            self._heading: f"### {plain(heading(speaker))}",
            self._chat: gr.update(value=messages, label=f"Conversation with {heading(speaker)}"),
            self._facts: facts,
        }


def heading(speaker: Speaker) -> str:
    """Name of a model."""
    if speaker.side == "other":
        against = speaker.model.against
        return called(f"step {against}" if against.isdecimal() else against)
    return f"{speaker.model.run}, step {speaker.model.step:,}"


def _state(answer: Request | None) -> str:
    if answer is None:
        return "Not computed: press Send without a message."
    if answer.is_over:
        return f"**{answer.state.capitalize()}**{f': {plain(answer.error)}' if answer.error else ''}"
    return plain((answer.stage or answer.state).capitalize())


def _has_result(answer: Request | None) -> bool:
    return answer is not None and answer.result is not None


def _turns(turns: Sequence[str]) -> Done:
    return Done(query={"turns": json.dumps(list(turns), ensure_ascii=False) if turns else "", "key": ""})
