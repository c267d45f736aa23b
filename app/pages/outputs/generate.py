"""The Generate tab: answers of both models to a prompt, side by side, and blind votes on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gradio as gr

from nnxdsl.errors import RunError

from ...components.tokens import as_tokenized
from ...components.word_diff import word_diff
from ...html import Child, Html, join, link, tag
from ...markdown import plain
from ...processes.outputs_worker import Request
from ...processes.votes import are_equal
from ...state import Site
from ...view import Done, Query, Values, View
from ...words import number
from .forms import SAMPLER, Form, number_fields, prompt_fields, requested, save_buttons, saved
from .request import MOST_SAMPLES, Chosen, chosen
from .stats import wilson

CHOICES = (("A is better", "a"), ("No difference", "tie"), ("B is better", "b"))


class Generate:
    """Components of the tab."""

    def __init__(self, site: Site, view: View) -> None:
        """Adds the components."""
        self._site = site
        with gr.Group():
            fields = prompt_fields()
            fields |= number_fields(
                ("max", "Max new tokens", f"At most {site.settings.limits.new_tokens:,}"),
                ("samples", "Samples per model", f"At most {MOST_SAMPLES}; one if greedy"),
                *SAMPLER,
                ("seed", "Seed", "The same for both models"),
            )
            fields["blind"] = gr.Checkbox(label="Blind", info="Hide whose answer is whose until I vote")
        self.form = Form(site, view, "generate", "Generate", fields)
        with gr.Column(visible=False) as self.found:
            self._panes = gr.HTML(apply_default_css=False)
            with gr.Row(visible=False) as self._votes:
                for label, choice in () if site.settings.read_only else CHOICES:
                    view.does(gr.Button(label).click, partial(self._voted, choice))
            self._tally = gr.Markdown()
            self._settings = gr.Markdown()
            with gr.Accordion("The prompt as tokenized for both models"):
                self._prompt = gr.HTML(apply_default_css=False)
            with gr.Column(visible=False) as self._told:
                self._saves = save_buttons("jsonl")
        self.outputs = [
            *(self.found, self._panes, self._votes, self._tally, self._settings, self._prompt, self._told),
            *self._saves.values(),
        ]

    def values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        """What a result shows."""
        (found,) = requests
        assert found.result is not None
        is_blind = query.get("blind") == "1" and not self._site.votes.has(found.key)
        order = self._site.votes.order(found.key) if is_blind else ("policy", "other")
        return {
            self.found: gr.update(visible=True),
            self._panes: self._answers(here, found.key, found.result, order, is_blind),
            self._votes: gr.update(visible=is_blind),
            self._tally: self._tallied(found),
            self._settings: _settings(found.result),
            self._prompt: as_tokenized(found.result["prompt_pieces"], set(found.result["special"])),
            self._told: gr.update(visible=not is_blind),
            **saved(self._site, self._saves, found),
        }

    def _voted(self, choice: str, query: Query, client: str) -> Done:
        found = next(iter(requested(self._site, chosen(self._site, query), query)), None)
        if found is None or found.result is None:
            raise RunError("This answer is no longer stored; generate it again.")
        side = self._site.votes.add(found, choice)
        names = {
            "policy": f"you preferred the policy, step {found.model.step}",
            "other": f"you preferred the other side, {found.result['against']}",
            "tie": "no difference",
        }
        return Done(f"Recorded: {names[side]}.")

    def _tallied(self, found: Request) -> str:
        """All votes on these two models."""
        assert found.result is not None
        tally = self._site.votes.tally(found.model)
        if not any(tally.values()):
            return ""
        words = f"Blind votes on these two: policy {tally['policy']}, {plain(str(found.result['against']))} "
        words += f"{tally['other']}, no difference {tally['tie']}."
        decided = tally["policy"] + tally["other"]
        if decided:
            low, high = wilson(tally["policy"], decided)
            share = tally["policy"] / decided
            words += f" The policy won {share:.0%} of {decided} (95 % interval {low:.0%} to {high:.0%})."
        return words

    def _answers(self, here: Chosen, key: str, result: Mapping[str, Any], order: Sequence[str], is_blind: bool) -> Html:
        """Both sides in their order; while they are blind, nothing tells which is which."""
        drawn = [_samples(result, side) for side in order]
        pairs = zip(*drawn, strict=True)
        marked = [word_diff(one["text"], other["text"], strike=not is_blind) for one, other in pairs]
        panes: list[Html] = []
        for place, side in enumerate(order):
            many = len(drawn[place]) > 1
            parts: list[Child] = [tag("h3", _heading(result, side, "AB"[place] if is_blind else "", many))]
            for number_, (answer, texts) in enumerate(zip(drawn[place], marked, strict=True), start=1):
                facts = [tag("span", f"{number_} of {len(drawn[place])}")] if many else []
                facts += _facts(answer, with_seconds=number_ == 1 and not is_blind)
                if not is_blind:
                    look = {"tab": "tokens", "from": key, "side": side, "n": number_ if many else None}
                    facts.append(tag("a", "Its tokens", href=self._link(here, look)))
                shown = texts[place] if answer["text"] else tag("span", "(nothing)", cls="subdued")
                parts += [tag("div", shown, cls="answer"), tag("p", facts, cls="facts-line")]
            panes.append(tag("section", parts, cls="pane" if is_blind else f"pane {side}"))
        return join(_equality(result, is_blind), tag("div", panes, cls="panes"))

    def _link(self, here: Chosen, query: Mapping[str, Any]) -> str:
        return self._site.settings.root + link("/outputs", **here.query, **query)


def called(against: str) -> str:
    """Heading of the other side of a comparison; names of runs are unchanged."""
    return against if "," in against else against[:1].upper() + against[1:]


def _samples(result: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    return [result[side], *result[side].get("more", ())]


def _heading(result: Mapping[str, Any], side: str, letter: str, many: bool) -> str:
    if letter:
        return f"Answer{'s' if many else ''} {letter}"
    return f"Policy, step {result['step']:,}" if side == "policy" else called(str(result["against"]))


def ended(answer: Mapping[str, Any]) -> str:
    """Why an answer ended."""
    return f"stopped at {answer['stop']}" if answer["stop"] else f"truncated at {answer['tokens']} tokens"


def _facts(answer: Mapping[str, Any], *, with_seconds: bool) -> list[Html]:
    facts = [tag("span", f"{answer['tokens']} tokens"), tag("span", ended(answer))]
    if with_seconds:
        facts.append(tag("span", f"{answer['seconds']:.2f} s", title="excluding compilation"))
    return facts


def _equality(result: Mapping[str, Any], is_blind: bool) -> Html:
    """That the answers are equal, or what the marks of their words mean."""
    if are_equal(result):
        count = len(_samples(result, "policy"))
        words = f"Both gave the same {f'{count} answers' if count > 1 else 'answer'}, token for token."
        return tag("p", words, " A vote on it counts as a tie." if is_blind else None)
    if is_blind:  # striking one of them out would bias the vote
        return tag("p", tag("ins", "Underlined"), ": in this answer only.", cls="subdued")
    policy = (tag("ins", "Underlined"), ": in the policy's answer only. ")
    return tag("p", policy, tag("del", "Struck through"), ": in the other answer only.", cls="subdued")


def _settings(result: Mapping[str, Any]) -> str:
    sampling = result["sampling"]
    greedy = not sampling["temperature"]
    named = {
        "Temperature": "0, greedy decoding" if greedy else number(sampling["temperature"]),
        "Top-k": sampling["top_k"] or "all tokens",
        "Top-p": sampling["top_p"] or "all tokens",
        "Max new tokens": f"{sampling['max_new_tokens']:,}",
        "Seed": "no effect at temperature 0" if greedy else f"{sampling['seed']}, the same for both",
        "Samples per model": len(_samples(result, "policy")),
        "Prompt": f"{len(result['prompt_pieces']):,} tokens",
    }
    return " · ".join(f"{name}: {value}" for name, value in named.items())
