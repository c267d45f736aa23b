"""The Generate tab: answers of both models, side by side, and votes; the All checkpoints tab: those of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import gradio as gr
import pandas as pd

from nnxdsl.errors import RunError

from ...components.tokens import as_tokenized, word_diff
from ...formatting import number, sentence
from ...markup import Child, Html, join, link, plain, tag
from ...processes.outputs_worker import Model, Request
from ...processes.votes import SIDES, are_equal, samples_of
from ...view import Done, Query, Values, View
from .interval import wilson
from .request import Chosen, chosen
from .tab import Tab, save_buttons, saved

SHOWN = 300  # most characters of a prompt above its answers


class Generate(Tab):
    """Answers of both models to one prompt or several, side by side, and votes on them."""

    name = "generate"
    title = button = "Generate"
    has_many = True
    hint = "Enter prompts or choose held-out ones, and press Generate. Both models sample with the same seed."

    def _add_result(self, view: View) -> None:
        blind = gr.Checkbox(label="Blind", info="Hide which model gave an answer until I vote on it", container=False)
        self._blind = view.control("blind", blind)
        self._panes = gr.HTML(js_on_load="nnx.votes(element, trigger);", apply_default_css=False)
        if not self.site.settings.read_only:
            view.on(self._panes.select, self._voted, has_event=True)
        self._tally = gr.Markdown()
        with gr.Column(visible=False) as self._about:
            self._settings = gr.Markdown()
            with gr.Accordion("The prompts as tokenized for both models"):
                self._prompts = gr.HTML(apply_default_css=False)
        with gr.Column(visible=False) as self._downloads:
            self._saves = save_buttons("jsonl")

    def _values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        """The answers; while they are blind, nothing tells which is which, nor which model is the first to answer."""
        finished = [request for request in requests if request.result is not None]
        results = [request.result for request in finished if request.result is not None]
        is_blind = any(self._is_blind(request, query) for request in finished)
        shown: dict[Any, Any] = {
            self._blind: query.get("blind") == "1",
            self._panes: join(*(self._answers(here, requests, number, query) for number in range(len(requests)))),
            self._tally: "",
            self._about: gr.update(visible=bool(results)),
            self._downloads: gr.update(visible=bool(results) and not is_blind),
        }
        if not results:
            return shown
        return {
            **shown,
            self._tally: self._tallied(finished[0].model, str(results[0]["against"])),
            self._settings: _settings(results),
            self._prompts: join(*(as_tokenized(one["prompt_pieces"], set(one["special"])) for one in results)),
            **saved(self.site, self._saves, *finished),
        }

    def _is_blind(self, request: Request, query: Query) -> bool:
        return query.get("blind") == "1" and self.site.votes.choice(request.key) is None

    def _answers(self, here: Chosen, requests: Sequence[Request], number: int, query: Query) -> Html:
        """The answers to the prompt of a number, with the buttons of a vote on them."""
        request, is_blind = requests[number], self._is_blind(requests[number], query)
        prompt = str(request.request.get("row") or request.request.get("prompt") or "")
        heading = tag("h3", f"{number + 1} of {len(requests)}: {prompt[:SHOWN]}", cls="prompt")
        if request.result is None:
            waits = "The answers are shown when both are complete." if is_blind else request.error or request.state
            pane = _so_far(request) if request.so_far and not is_blind else tag("p", waits, cls="subdued")
        else:
            order = self.site.votes.order(request.key) if is_blind else SIDES
            links = self.site.settings.root + link("/outputs", **here.query, tab="tokens", **{"from": request.key})
            pane = _panes(request.result, order, None if is_blind else links)
            if not self.site.settings.read_only:
                names = "AB" if is_blind else ("Policy", called(str(request.result["against"])))
                pane = join(pane, _votes(number, names, self.site.votes.choice(request.key)))
        return join(heading if len(requests) > 1 else None, pane)

    def _voted(self, query: Query, event: gr.SelectData) -> Done:
        place, _, choice = str(event.value).partition(":")
        requests = dict(enumerate(self.requested(chosen(self.site, query), query)))
        request = requests.get(int(place)) if place.isdecimal() and len(place) < 4 else None
        if request is None or request.result is None:
            raise RunError("This answer is no longer stored; generate it again.")
        names = {
            "policy": f"you preferred the policy, step {request.model.step}",
            "other": f"you preferred the other side, {request.result['against']}",
            "tie": "no difference",
        }
        side = self.site.votes.add(request, choice, is_blind=self._is_blind(request, query))
        return Done(f"Recorded: {names[side]}.")

    def _tallied(self, model: Model, against: str) -> str:
        """All votes on these two models; the interval is of the blind ones."""
        votes, blind = self.site.votes.tally(model), self.site.votes.tally(model, blind_only=True)
        if not sum(votes.values()):
            return ""
        text = f"Votes on these two: policy {votes['policy']}, {plain(against)} {votes['other']}, no difference "
        text += f"{votes['tie']}; {sum(blind.values())} of them blind."
        if decided := blind["policy"] + blind["other"]:
            low, high = wilson(blind["policy"], decided)
            text += f" The policy won {blind['policy'] / decided:.0%} of {decided} blind votes"
            text += f" (95 % interval {low:.0%} to {high:.0%})."
        return text


class Checkpoints(Tab):
    """Answers of the policy of every checkpoint."""

    name = "checkpoints"
    title, button = "All checkpoints", "Generate with each"
    hint = "Enter a prompt or choose a held-out one: the policy of every checkpoint answers it in turn."

    def _add_result(self, view: View) -> None:
        self._table = gr.Dataframe(interactive=False, wrap=True, max_height=700, column_widths=[90, 780, 100, 230])

    def _to_submit(self, here: Chosen, query: Query) -> list[tuple[Model, dict[str, Any]]]:
        """The request to every checkpoint of the run, by step."""
        return [
            (
                attrs.evolve(model, step=step, against="reference" if here.against == str(step) else here.against),
                request,
            )
            for model, request in super()._to_submit(here, query)
            for step in (0, *here.steps[::-1])
        ]

    def _values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        """The answers that there are, and the beginning of one."""
        answers = [(one.model.step, one.result["policy"]) for one in requests if one.result is not None]
        rows = [(step, answer["text"], answer["tokens"], ended(answer)) for step, answer in answers]
        begun = [(one.model.step, *begin[:2], "running") for one in requests for begin in beginnings(one, "policy")]
        table = pd.DataFrame(sorted([*rows, *begun]), columns=["step", "answer", "tokens", "end"])
        label = f"Answers of {len(rows)} of {len(here.steps) + 1} checkpoints; step 0 is the policy before training"
        return {self._table: gr.update(value=table, label=label)}


def called(against: str) -> str:
    """Heading of the other side of a comparison; names of runs are unchanged."""
    return against if "," in against else sentence(against)


def other_of(model: Model) -> str:
    """Heading of the other side of a request: its reference, a step, or a step of another run."""
    run, _, step = model.against.rpartition("@")
    if not step.isdecimal():
        return called(model.against)
    return f"{run}, step {int(step):,}" if run else f"Step {int(step):,}"


def beginnings(request: Request, side: str) -> list[tuple[str, int, bool]]:
    """What is sampled so far of each answer of a running request: its text, its tokens, and whether it has ended."""
    progress = request.so_far.get(side, {"texts": (), "tokens": (), "done": ()})
    return list(zip(progress["texts"], progress["tokens"], progress["done"], strict=True))


def ended(answer: Mapping[str, Any]) -> str:
    """Why an answer ended."""
    return f"stopped at {answer['stop']}" if answer["stop"] else f"truncated at {answer['tokens']} tokens"


def _so_far(request: Request) -> Html:
    headings, panes = {"policy": f"Policy, step {request.model.step:,}", "other": other_of(request.model)}, []
    for side, heading in headings.items():
        answers = [
            (text, [f"{tokens} tokens so far, {'complete' if is_done else 'running'}"])
            for text, tokens, is_done in beginnings(request, side)
        ]
        panes.append(_pane(heading, answers, cls="pane running", aria_busy="true", data_side=side))
    return tag("div", panes, cls="panes")


def _panes(result: Mapping[str, Any], order: Sequence[str], links: str | None) -> Html:
    """Both sides in an order, each with a link to its tokens; without links they are called A and B."""
    samples, is_blind = [samples_of(result, side) for side in order], links is None
    marked = [word_diff(one["text"], other["text"], strike=not is_blind) for one, other in zip(*samples, strict=True)]
    many, panes = len(marked) > 1, []
    names = {"policy": f"Policy, step {result['step']:,}", "other": called(str(result["against"]))}
    for place, side in enumerate(order):
        answers: list[tuple[Child, list[Child]]] = []
        for position, (answer, texts) in enumerate(zip(samples[place], marked, strict=True), start=1):
            facts: list[Child] = [f"{position} of {len(marked)}"] if many else []
            facts += [f"{answer['tokens']} tokens", ended(answer)]
            if not is_blind and position == 1:
                facts.append(tag("span", f"{answer['seconds']:.2f} s", title="excluding compilation"))
            if not is_blind:
                facts.append(tag("a", "Its tokens", href=f"{links}&side={side}{f'&n={position}' if many else ''}"))
            answers.append((texts[place] if answer["text"] else tag("span", "(nothing)", cls="subdued"), facts))
        heading = f"Answer{'s' * many} {'AB'[place]}" if is_blind else names[side]
        panes.append(_pane(heading, answers, cls="pane" if is_blind else f"pane {side}"))
    return join(_marks(result, is_blind), tag("div", panes, cls="panes"))


def _pane(heading: str, answers: Sequence[tuple[Child, Sequence[Child]]], **attributes: str) -> Html:
    parts = [
        (
            tag("div", text, cls="answer"),
            tag("p", [fact if isinstance(fact, Html) else tag("span", fact) for fact in facts], cls="facts-line"),
        )
        for text, facts in answers
    ]
    return tag("section", tag("h3", heading), parts, **attributes)


def _marks(result: Mapping[str, Any], is_blind: bool) -> Html:
    """What the marks of words mean, or that the answers are equal."""
    if are_equal(result):
        count = len(samples_of(result, "policy"))
        text = f"Both gave the same {f'{count} answers' if count > 1 else 'answer'}, token for token."
        return tag("p", text, " A vote on it counts as a tie." if is_blind else None)
    if is_blind:  # striking one of them out would bias the vote
        return tag("p", tag("ins", "Underlined"), ": in this answer only.", cls="subdued")
    policy = (tag("ins", "Underlined"), ": in the policy's answer only. ")
    return tag("p", policy, tag("del", "Struck through"), ": in the other answer only.", cls="subdued")


def _votes(number: int, names: Sequence[str], voted: str | None) -> Html:
    """The buttons of a vote on the answers to the prompt of a number; the one that was pressed is marked."""
    a, b = names
    choices = ((f"{a} is better", "a", "policy"), ("No difference", "tie", "tie"), (f"{b} is better", "b", "other"))
    buttons = [
        tag("button", label, type="button", data_vote=f"{number}:{choice}", aria_pressed=str(voted == side).lower())
        for label, choice, side in choices
    ]
    return tag("p", buttons, cls="votes")


def _settings(results: Sequence[Mapping[str, Any]]) -> str:
    sampling, greedy = results[0]["sampling"], not results[0]["sampling"]["temperature"]
    lengths = sorted(len(result["prompt_pieces"]) for result in results)
    named = {
        "Temperature": "0, greedy decoding" if greedy else number(sampling["temperature"]),
        "Top-k": sampling["top_k"] or "all tokens",
        "Top-p": sampling["top_p"] or "all tokens",
        "Max new tokens": f"{sampling['max_new_tokens']:,}",
        "Seed": "no effect at temperature 0" if greedy else f"{sampling['seed']}, the same for both",
        "Samples per model": len(samples_of(results[0], "policy")),
        "Prompt": " to ".join(f"{length:,}" for length in dict.fromkeys((lengths[0], lengths[-1]))) + " tokens",
    }
    return " · ".join(f"{name}: {value}" for name, value in named.items())
