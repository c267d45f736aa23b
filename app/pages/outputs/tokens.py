"""The Tokens tab: `log p(policy) - log p(other)` of each token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
import numpy as np
import pandas as pd

from ...components.plots import Chart, Line, figure
from ...components.tokens import Token, heat_map, legend, signed, token_map, visible
from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...processes.outputs_worker import Request
from ...state import Site
from ...view import Query, Values, View
from .forms import Form, prompt_fields, save_buttons, saved
from .generate import called
from .request import Chosen

SCALES = ("0.1", "0.5", "2", "5")
"""Limits of the colour scale, in nats; fixed choices, so that texts are comparable."""

SCALE = "2"
SHOWN = 2_000
"""Maximum number of tokens that are drawn; a download has all."""

NAMES = {"text": "Text", "chosen": "Chosen", "rejected": "Rejected"}
CHOOSE = "Choose a token, by a click or with the arrow keys, to see what both models find most likely in its place."


class Tokens:
    """Components of the tab."""

    def __init__(self, site: Site, view: View) -> None:
        """Adds the components."""
        self._site = site
        self._of_answer = gr.Markdown(visible=False)
        with gr.Group() as self._own:
            text = gr.Textbox(label="Answer", info="Scored after the prompt", lines=3, max_lines=12, render=False)
            fields = prompt_fields(text)
        self.form = Form(site, view, "tokens", "Score with both models", fields)
        with gr.Column(visible=False) as self.found:
            self._sums = gr.Markdown()
            with gr.Row(equal_height=True):
                choices = [(f"±{one} nats", one) for one in SCALES]
                scale = gr.Dropdown(choices, value=SCALE, label="Colour scale", scale=0, min_width=180)
                self._scale = view.control("scale", scale, SCALE)
                self._legend = gr.HTML(apply_default_css=False)
            with gr.Row():
                self._sides = [_Side(view) for _ in range(2)]
            with gr.Column(elem_classes=["token-detail"]):
                self._token = gr.Markdown(CHOOSE)
                with gr.Row():
                    self._likeliest = [
                        gr.Dataframe(visible=False, interactive=False, wrap=True, min_width=260, buttons=[])
                        for _ in range(2)
                    ]
            self._plot = gr.Plot(show_label=False)
            self._saves = save_buttons("csv", "jsonl")
        self.outputs = [
            *(self.found, self._sums, self._legend, self._scale, self._token, *self._likeliest, self._plot),
            *(component for side in self._sides for component in side.outputs),
            *self._saves.values(),
        ]
        self.filled_outputs = [self._of_answer, self._own]

    def filled(self, here: Chosen, query: Query) -> Values:
        """What stands in place of the fields where the text is an answer that was generated."""
        is_of_answer = bool(query.get("from"))
        own = self._site.settings.root + link("/outputs", **here.query, tab="tokens")
        words = f"The tokens of a generated answer, exactly as sampled. {markdown_link('Score another text', own)}"
        return {
            self._of_answer: gr.update(visible=is_of_answer, value=words),
            self._own: gr.update(visible=not is_of_answer),
        }

    def values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        """What a result shows."""
        (found,) = requests
        result = found.result
        assert result is not None
        scale = query["scale"] if query.get("scale") in SCALES else SCALE
        values: dict[Any, Any] = {
            self.found: gr.update(visible=True),
            self._sums: _margin(result),
            self._scale: scale,
            self._legend: legend(float(scale)),
            self._plot: _growth(result),
            **self._chosen_token(result, query.get("at", "")),
        }
        for place, column in enumerate(self._sides):
            side = result["sides"][place] if place < len(result["sides"]) else None
            values |= column.values(side, str(result["against"]), float(scale), f"{place}.")
        return {**values, **saved(self._site, self._saves, found)}

    def _chosen_token(self, result: Mapping[str, Any], name: str) -> Values:
        """The log-probs of a token under both models, and those of the most likely ones."""
        place, _, number = name.partition(".")
        side = result["sides"][int(place)] if place in [str(n) for n, _ in enumerate(result["sides"])] else None
        at = int(number) if number.isdecimal() and len(number) < 9 else -1
        if side is None or not side["begin"] <= at < len(side["ids"]):
            empty = gr.update(visible=False, value=pd.DataFrame())
            return {self._token: CHOOSE, **dict.fromkeys(self._likeliest, empty)}
        at -= side["begin"]
        policy, other, against = side["policy"][at], side["other"][at], str(result["against"])
        piece = side["pieces"][at + side["begin"]]
        difference = signed(None if policy is None or other is None else policy - other)
        words = f"**{plain(repr(piece))}**, token {at + side['begin']}: policy {_nats(policy)}, {plain(against)} "
        words += f"{_nats(other)}, difference {difference} nats"
        values: dict[Any, Any] = {self._token: words}
        for who, table in zip(("policy", "other"), self._likeliest, strict=True):
            rows = (side.get("likeliest") or {}).get(who)
            label = f"Most likely under {'the policy' if who == 'policy' else against}, in nats"
            values[table] = gr.update(
                visible=bool(rows), value=_likeliest(rows[at] if rows else [], piece, against), label=label
            )
        return values


class _Side:
    """A column with a text, its sums and its tokens."""

    def __init__(self, view: View) -> None:
        with gr.Column(min_width=300) as self._column:
            self._sums = gr.Markdown()
            self._map = token_map(view, "at")
        self.outputs = [self._column, self._sums, self._map]

    def values(self, side: Mapping[str, Any] | None, against: str, scale: float, prefix: str) -> Values:
        if side is None:
            return {self._column: gr.update(visible=False)}
        differences = _differences(side)
        name = NAMES.get(str(side["name"]), str(side["name"]))
        begin, special = side["begin"], set(side["special"])
        tokens = [
            Token(piece, None if at < begin else differences[at - begin], at < begin, at in special)
            for at, piece in enumerate(side["pieces"][:SHOWN])
        ]
        return {
            self._column: gr.update(visible=True),
            self._sums: f"### {plain(name)}\n{_sums(side, differences, against, scale)}",
            self._map: heat_map(tokens, scale, f"{name}: tokens", prefix),
        }


def _margin(result: Mapping[str, Any]) -> str:
    """What is subtracted from what, and the parts of a pair's reward margin."""
    words = f"Each token: policy at step {result['step']:,} minus {plain(str(result['against']))}, in nats."
    sums = {side["name"]: _sum(side["policy"]) - _sum(side["other"]) for side in result["sides"]}
    if set(sums) != {"chosen", "rejected"}:
        return words
    margin = sums["chosen"] - sums["rejected"]
    return (
        f"Log-ratio of the chosen answer {signed(sums['chosen'])}, of the rejected one {signed(sums['rejected'])}: "
        f"**difference {signed(margin)} nats, {'right' if margin > 0 else 'wrong'}**.\n\n{words}"
    )


def _sums(side: Mapping[str, Any], differences: Sequence[float | None], against: str, scale: float) -> str:
    policy, other = _sum(side["policy"]), _sum(side["other"])
    parts = [
        f"Policy {policy:.3f} nats",
        f"{plain(called(against))} {other:.3f} nats",
        f"difference {signed(policy - other)} nats over {len(differences)} tokens",
    ]
    if differences:
        parts.append(f"per token {signed((policy - other) / len(differences))}")
    finite = [(abs(one), place) for place, one in enumerate(differences) if one is not None]
    if len(finite) > 1:
        place = max(finite)[1]
        piece = side["pieces"][place + side["begin"]]
        parts.append(f"largest {signed(differences[place])} at token {place + side['begin']}, {plain(repr(piece))}")
    beyond = sum(one > scale for one, _ in finite)
    if beyond:
        parts.append(f"{beyond} of {len(differences)} tokens exceed ±{scale:g} and are clipped to the end of the scale")
    if len(side["pieces"]) > SHOWN:
        parts.append(f"the first {SHOWN:,} of {len(side['pieces']):,} tokens are drawn; the download has all")
    return "; ".join(parts) + "."


def _growth(result: Mapping[str, Any]) -> Any:
    lines: list[Line] = []
    for colour, side in enumerate(result["sides"]):
        filled = np.array([0.0 if one is None else one for one in _differences(side)])
        lines.append(Line(str(side["name"]), np.arange(1, len(filled) + 1), np.cumsum(filled), colour=colour))
    title = "Cumulative difference by token, in nats"
    return figure([Chart(title, lines)], "token of the answer", 1)


def _likeliest(rows: Sequence[Any], piece: str, against: str) -> pd.DataFrame:
    found = [[f"{visible(text)} ✓" if text == piece else visible(text), _nats(a), _nats(b)] for text, a, b in rows]
    return pd.DataFrame(found, columns=["token", "policy", against])


def _differences(side: Mapping[str, Any]) -> list[float | None]:
    return [
        None if mine is None or theirs is None else mine - theirs
        for mine, theirs in zip(side["policy"], side["other"], strict=True)
    ]


def _sum(values: Sequence[float | None]) -> float:
    return sum(value for value in values if value is not None)


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
