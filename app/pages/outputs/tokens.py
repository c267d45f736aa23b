"""The Tokens tab: `log p(policy) - log p(other)` of each token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
import numpy as np
import pandas as pd

from ...components.plots import Chart, Line, figure
from ...components.tokens import Token, heat_map, legend, signed, token_map, visible
from ...formatting import whole
from ...markup import markdown_link, plain
from ...processes.outputs_worker import Request
from ...processes.votes import SIDES
from ...state import Site
from ...view import Query, Values, View, if_any
from .export import tokens_of
from .generate import called
from .request import Chosen
from .tab import Tab, save_buttons, saved

SCALES = ("0.1", "0.5", "2", "5")  # limits of the colour scale, in nats; fixed choices, so that texts are comparable
SCALE = "2"
SHOWN = 2_000  # maximum number of tokens that are drawn; a download has all
CHOOSE = "Choose a token, by a click or with the arrow keys, to see what both models find most likely in its place."

Side = Mapping[str, Any]  # a text with the log-probs of its tokens
Table = Any  # a `pandas.DataFrame` of `tokens_of`


class Tokens(Tab):
    """Log-probs of a text's tokens under both models, and their differences."""

    name = "tokens"
    title, button = "Tokens", "Score with both models"
    needs = "a text: enter it, or choose a held-out row"
    hint = (
        "Choose a held-out row or enter a text: both models score it, and each token shows how much more likely it is "
        "under the policy."
    )

    def __init__(self, site: Site, view: View) -> None:
        self._of_answer = gr.Markdown(visible=False)  # in the place of the form, where the text was generated
        super().__init__(site, view)

    def _add_result(self, view: View) -> None:
        self._sums = gr.Markdown()
        with gr.Row(equal_height=True):
            scales = [(f"±{one} nats", one) for one in SCALES]
            scale = gr.Dropdown(scales, value=SCALE, label="Colour scale", scale=0, min_width=180)
            self._scale = view.control("scale", scale, SCALE)
            self._legend = gr.HTML(apply_default_css=False)
        self._columns: list[tuple[gr.Column, gr.Markdown, gr.HTML]] = []
        with gr.Row():
            for _ in range(2):
                with gr.Column(min_width=300) as column:
                    self._columns.append((column, gr.Markdown(), token_map(view, "at")))
        with gr.Column(elem_classes=["token-detail"]):
            self._token = gr.Markdown(CHOOSE)
            with gr.Row():
                table: dict[str, Any] = {"visible": False, "interactive": False, "wrap": True, "buttons": []}
                self._likeliest = [gr.Dataframe(min_width=260, **table) for _ in range(2)]
        self._plot = gr.Plot(show_label=False)
        self._saves = save_buttons("csv", "jsonl")

    def fill_form(self, here: Chosen, query: Query) -> Values:
        """The fields, or what stands in their place where the text is an answer that was generated."""
        another = markdown_link("Score another text", f"{self.site.settings.root}/outputs", **here.query, tab="tokens")
        return {
            **super().fill_form(here, query),
            self._of_answer: gr.update(
                visible=bool(query.get("from")),
                value=f"The tokens of a generated answer, exactly as sampled. {another}",
            ),
            self.form: gr.update(visible=not query.get("from")),
        }

    def fill_results(self, here: Chosen, query: Query) -> tuple[Request | None, Values]:
        """Scores a text that the query names, such as that of a link, at once."""
        if not self.site.settings.read_only and not self.requested(here, query):
            for model, request in self._to_submit(here, query):
                self.site.answers.ask(model, request)
        return super().fill_results(here, query)

    def _submitted(self, here: Chosen, query: Query, texts: Mapping[str, str]) -> dict[str, str]:
        return {**texts, **{name: query[name] for name in ("from", "side", "n") if name in query}}

    def _values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        result = requests[0].result
        assert result is not None
        scale, sides, against = query.get("scale", SCALE), result["sides"], str(result["against"])
        scale = scale if scale in SCALES else SCALE
        tables = [tokens_of(side) for side in sides]
        growth = [
            Line(str(side["name"]), np.arange(len(table)) + 1, np.nancumsum(table["difference"]), colour)
            for colour, (side, table) in enumerate(zip(sides, tables, strict=True))
        ]
        values: dict[Any, Any] = {
            self._sums: _margin(result, tables),
            self._scale: scale,
            self._legend: legend(float(scale)),
            self._plot: figure(
                [Chart("Cumulative difference by token, in nats", growth)],
                "token of the answer",
                1,
            ),
            **self._chosen(sides, tables, against, query.get("at", "")),
            **saved(self.site, self._saves, requests[0]),
        }
        for place, (column, sums, tokens) in enumerate(self._columns):
            values[column] = gr.update(visible=place < len(sides))
            if place < len(sides):
                name = str(sides[place]["name"]).capitalize()
                values[sums] = f"### {plain(name)}\n{_sums(tables[place], sides[place], against, float(scale))}"
                table = _tokens(sides[place], tables[place])
                values[tokens] = heat_map(table, float(scale), f"{name}: tokens", f"{place}.")
        return values

    def _chosen(self, sides: Sequence[Side], tables: Sequence[Table], against: str, name: str) -> Values:
        """The log-probs of a token under both models, and those of the most likely ones."""
        first, _, second = name.partition(".")
        place, index = whole(first), whole(second)
        if place is None or place >= len(sides) or index not in tables[place].index:
            empty = gr.update(visible=False, value=pd.DataFrame())
            return {self._token: CHOOSE, **dict.fromkeys(self._likeliest, empty)}
        one, likeliest = tables[place].loc[index], sides[place].get("likeliest") or {}
        figures = f"policy {_nats(one['policy_logp'])}, {plain(against)} {_nats(one['other_logp'])}"
        caption = (
            f"**{plain(repr(one['token']))}**, token {index}: {figures}, difference {signed(one['difference'])} nats"
        )
        values: dict[Any, Any] = {self._token: caption}
        for who, table in zip(SIDES, self._likeliest, strict=True):
            alternatives = likeliest[who][index - sides[place]["begin"]] if likeliest.get(who) else ()
            lines = [
                [f"{visible(text)}{' ✓' * (text == one['token'])}", _nats(mine), _nats(theirs)]
                for text, mine, theirs in alternatives
            ]
            label = f"Most likely under {'the policy' if who == 'policy' else against}, in nats"
            values[table] = if_any(pd.DataFrame(lines, columns=["token", "policy", against]), label=label)
        return values


def _tokens(side: Side, table: Table) -> list[Token]:
    differences, special = table["difference"].to_dict(), set(side["special"])
    return [
        Token(piece, differences.get(index, 0.0), index not in differences, index in special)
        for index, piece in enumerate(side["pieces"][:SHOWN])
    ]


def _margin(result: Mapping[str, Any], tables: Sequence[Table]) -> str:
    """What is subtracted from what, and the parts of a pair's reward margin."""
    text = f"Each token: policy at step {result['step']:,} minus {plain(str(result['against']))}, in nats."
    totals = [table["policy_logp"].sum() - table["other_logp"].sum() for table in tables]
    sums = dict(zip([side["name"] for side in result["sides"]], totals, strict=True))
    if set(sums) != {"chosen", "rejected"}:
        return text
    margin = sums["chosen"] - sums["rejected"]
    return (
        f"Log-ratio of the chosen answer {signed(sums['chosen'])}, of the rejected one {signed(sums['rejected'])}: "
        f"**difference {signed(margin)} nats, {'right' if margin > 0 else 'wrong'}**.\n\n{text}"
    )


def _sums(table: Table, side: Side, against: str, scale: float) -> str:
    policy, other = table["policy_logp"].sum(), table["other_logp"].sum()
    differences = table["difference"]
    count = int(differences.count())  # without tokens that are no targets
    parts = [
        f"Policy {policy:.3f} nats",
        f"{plain(called(against))} {other:.3f} nats",
        f"difference {signed(policy - other)} nats over {count} tokens",
    ]
    if count:
        parts.append(f"per token {signed((policy - other) / count)}")
    if differences.count() > 1:
        index = differences.abs().idxmax()
        parts.append(f"largest {signed(differences[index])} at token {index}, {plain(repr(table['token'][index]))}")
    if beyond := int((differences.abs() > scale).sum()):
        parts.append(f"{beyond} of {count} tokens exceed ±{scale:g} and are clipped to the end of the scale")
    if len(side["pieces"]) > SHOWN:
        parts.append(f"the first {SHOWN:,} of {len(side['pieces']):,} tokens are drawn; the download has all")
    return "; ".join(parts) + "."


def _nats(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{value:.3f}"
