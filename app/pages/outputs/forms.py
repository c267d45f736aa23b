"""Forms of the Outputs page, with every setting that an answer depends on."""

from __future__ import annotations

from collections.abc import Mapping

from ...html import Child, Html, join, link, tag
from ...state import Site
from .request import DEFAULTS, MOST_SAMPLES, Chosen, held_out_prompts

CHATS = (("", "formatted as in training"), ("yes", "a user message"), ("no", "plain text"))


def form(site: Site, here: Chosen, query: Mapping[str, str]) -> Html:
    """Returns the form of a tab, filled in from the query."""
    label = {"": "Generate", "tokens": "Score with both models", "pairs": "Compute"}[here.tab]
    fields = {"": _generate, "tokens": _tokens, "pairs": _pairs}[here.tab](site, here, query)
    button: Child = tag("button", label, cls="button primary", type="submit")
    if site.settings.read_only:
        button = tag("p", "Read-only: only cached results are shown.", cls="muted")
    return tag("form", fields, tag("div", button, cls="row"), cls="panel outputs-form", data_do="outputs.ask")


def _generate(site: Site, here: Chosen, query: Mapping[str, str]) -> Html:
    max_tokens = site.settings.limits.new_tokens
    settings = [
        _number(query, "max", "Max new tokens", min=1, max=max_tokens, step=1),
        _number(query, "samples", "Samples per model", min=1, max=MOST_SAMPLES, step=1),
        _number(query, "temperature", "Temperature (0: greedy)", min=0, max=10, step="any"),
        _number(query, "top_k", "Top-k", min=1, step=1, placeholder="all"),
        _number(query, "top_p", "Top-p", min=0, max=1, step="any", placeholder="all"),
        _number(query, "seed", "Seed, the same for both", min=0, step=1),
        tag(
            "label",
            tag("input", type="checkbox", name="blind", checked=query.get("blind") == "1"),
            " Blind: hide whose answer is whose until I vote",
            cls="row check",
        ),
    ]
    return join(_what(site, here, query), tag("div", settings, cls="fields"))


def _tokens(site: Site, here: Chosen, query: Mapping[str, str]) -> Html:
    if query.get("from"):
        hidden = [tag("input", type="hidden", name=name, value=query.get(name, "")) for name in ("from", "side", "n")]
        own = tag("a", "Score another text", href=link("/outputs", **here.query, tab="tokens"))
        return join(tag("p", "The tokens of a generated answer, exactly as sampled. ", own), hidden)
    text = tag("textarea", query.get("text", ""), name="text", rows=3, spellcheck="false")
    return join(_what(site, here, query), tag("label", "Answer", text, cls="wide own"))


def _pairs(site: Site, here: Chosen, query: Mapping[str, str]) -> Html:
    words = "Rewards and margins of the held-out pairs, computed as in the run's own evaluation."
    return join(tag("p", words), tag("div", _number(query, "limit", "Max pairs", min=1, step=1), cls="fields"))


def _what(site: Site, here: Chosen, query: Mapping[str, str]) -> Html:
    """Prompt fields: a held-out row, or a custom prompt."""
    rows = held_out_prompts(site, here.row.id) if here.row is not None else []
    chosen = query.get("row", "")
    options = [tag("option", "custom", value="")]
    is_one_file = len({where.rpartition(":")[0] for where, _ in rows}) == 1
    options += [
        tag(
            "option",
            f"{where.rpartition(':' if is_one_file else '/')[2]}: {text}",
            value=where,
            selected=where == chosen,
        )
        for where, text in rows
    ]
    if chosen and chosen not in [where for where, _ in rows]:
        options.append(tag("option", chosen, value=chosen, selected=True))
    prompt = tag("textarea", query.get("prompt", ""), name="prompt", rows=3, spellcheck="false", placeholder="Prompt")
    chats = [tag("option", text, value=value, selected=value == query.get("chat", "")) for value, text in CHATS]
    held_out = (
        tag("label", "Held-out row", tag("select", options, name="row"), cls="wide") if len(options) > 1 else None
    )
    return join(
        held_out,
        tag("label", "Prompt", prompt, cls="wide own"),
        tag("label", "The prompt is ", tag("select", chats, name="chat"), cls="row own"),
    )


def _number(query: Mapping[str, str], name: str, text: str, **limits: object) -> Html:
    value = query.get(name, DEFAULTS.get(name, ""))
    return tag("label", text, tag("input", type="number", name=name, value=value, **limits))
