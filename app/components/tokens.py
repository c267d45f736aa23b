"""Tokens of a text as text: coloured by a value each, or as they are. Independent of runs.

The text wraps at its words, however small the tokens are; values are shown when a token is chosen.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence

import attrs
import gradio as gr

from ..html import Html, join, tag
from ..view import View

_CHOOSES = """
const name = NAME, tokens = () => [...element.querySelectorAll("[data-token]")];
const mark = () => {
  const chosen = new URLSearchParams(location.search).get(name), all = tokens();
  const first = all.find((one) => one.dataset.token === chosen) ?? all[0];
  for (const one of all) {
    one.tabIndex = one === first ? 0 : -1;
    one.setAttribute("aria-pressed", one.dataset.token === chosen);
  }
};
const choose = (one) => { one.focus(); nnx.chosen = one.dataset.token; trigger("select", {}); setTimeout(mark, 50); };
element.addEventListener("click", (event) => {
  const one = event.target.closest("[data-token]");
  if (one) choose(one);
});
element.addEventListener("keydown", (event) => {
  const all = tokens(), at = all.indexOf(event.target), last = all.length - 1;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last, Enter: at, " ": at }[event.key];
  if (at < 0 || !all[to]) return;
  event.preventDefault();
  choose(all[to]);
});
watch("value", mark);
mark();
"""


@attrs.frozen
class Token:
    """A token of a text.

    Attributes:
        text: Its text.
        value: What colours it; None for a value that is not known.
        is_context: Whether it has no value at all, such as a token of a prompt.
        is_special: Whether it is a marker of the tokenizer.
    """

    text: str
    value: float | None = None
    is_context: bool = False
    is_special: bool = False


def token_map(view: View, name: str) -> gr.HTML:
    """Adds a component for `heat_map`; the chosen token is the part `name` of the query.

    A click chooses a token, as do the arrow keys, Home, End and Enter.
    """
    shown = gr.HTML(js_on_load=_CHOOSES.replace("NAME", json.dumps(name)), apply_default_css=False)
    view.sets(shown.select, name, "nnx.chosen")
    return shown


def heat_map(tokens: Sequence[Token], scale: float, label: str, prefix: str = "") -> Html:
    """Returns tokens coloured by their values, blue above and orange below 0.

    Args:
        tokens: The tokens.
        scale: Value of the strongest colour.
        label: Name of the text for screen readers.
        prefix: Beginning of the names of tokens in the query; their numbers follow.
    """
    parts = [_token(f"{prefix}{at}", one, scale) for at, one in enumerate(tokens)]
    return tag("div", parts, cls="heat", role="group", aria_label=label)


def legend(scale: float) -> Html:
    """Returns the colours of a scale with their values, and what they mean for log-probs of a policy."""
    stops = [_coloured(f"{scale * part:+g}" if part else "0", scale * part, scale) for part in (-1, -0.5, 0, 0.5, 1)]
    colours = tag("p", join(*stops, sep=" "), cls="heat-scale", role="img", aria_label=f"Colours of ±{scale:g} nats")
    meaning = "Orange, dotted: less likely under the policy. Blue, underlined: more likely."
    return join(colours, tag("p", meaning, cls="subdued"))


def as_tokenized(pieces: Sequence[str], special: Container[int]) -> Html:
    """Returns a text with its whitespace and markers visible."""
    shown = [
        tag("span", visible(piece, "·"), cls="special" if at in special else None) for at, piece in enumerate(pieces)
    ]
    return tag("pre", shown, cls="as-tokenized", tabindex=0)


def visible(piece: str, space: str = " ") -> str:
    """A piece of text whose whitespace can be seen.

    >>> visible(" a" + chr(9), "·")
    '·a→'
    """
    return piece.replace(" ", space).replace("\t", "→").replace("\r", "␍").replace("\n", "↵\n")


def signed(value: float | None) -> str:
    """A difference with its sign; `-` if it is not known."""
    return "-" if value is None else f"{value:+.3f}"


def _token(name: str, one: Token, scale: float) -> Html:
    special = " special" if one.is_special else ""
    if one.is_context:
        return tag("span", visible(one.text), cls=f"context{special}")
    told = f"{one.text!r}: {signed(one.value)} nats"
    return tag(
        "span",
        visible(one.text),
        cls=f"token {_way(one.value)}{special}",
        style=f"--w:{_weight(one.value, scale):.3f}",
        role="button",
        tabindex=-1,
        title=told,
        data_token=name,
    )


def _coloured(text: str, value: float, scale: float) -> Html:
    return tag("span", text, cls=f"token {_way(value)}", style=f"--w:{_weight(value, scale):.3f}")


def _way(value: float | None) -> str:
    return "even" if not value else "more" if value > 0 else "less"


def _weight(value: float | None, scale: float) -> float:
    return 0.0 if value is None else min(1.0, abs(value) / scale)
