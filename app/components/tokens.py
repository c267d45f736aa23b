"""Texts: tokens coloured by a value each, or as they are, and words that only one of two has. Independent of runs.

The text wraps at its words, however small the tokens are; values are shown when a token is chosen.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Container, Sequence
from typing import NamedTuple

import gradio as gr

from ..markup import Child, Html, join, tag
from ..view import View

PIECES = re.compile(r"\s+|\w+|[^\w\s]")
COMPARED = 4_000  # words of a text above which nothing is marked


class Token(NamedTuple):
    """A token, and the value that colours it: NaN if it is not known; a token of the context has none at all."""

    text: str
    value: float = math.nan
    is_context: bool = False
    is_special: bool = False


def token_map(view: View, name: str) -> gr.HTML:
    """Adds a component for `heat_map`; the chosen token is the part `name` of the query.

    A click chooses a token, as do the arrow keys, Home, End and Enter.
    """
    script = f"nnx.tokens(element, {json.dumps(name)}, trigger, watch);"
    shown = gr.HTML(js_on_load=script, apply_default_css=False)
    view.write_query(shown.select, name, "nnx.chosen")
    return shown


def heat_map(tokens: Sequence[Token], scale: float, label: str, prefix: str = "") -> Html:
    """Returns tokens coloured by their values, blue above and orange below 0, strongest at `scale`.

    Screen readers are told the label; names of tokens in the query are the prefix and a number.
    """
    parts = [_token(f"{prefix}{index}", one, scale) for index, one in enumerate(tokens)]
    return tag("div", parts, cls="heat", role="group", aria_label=label)


def legend(scale: float) -> Html:
    """Returns the colours of a scale with their values, and what they mean for log-probs of a policy."""
    values = [scale * part for part in (-1, -0.5, 0, 0.5, 1)]
    stops = [tag("span", f"{value:+g}" if value else "0", **_style(value, scale)) for value in values]
    colours = tag("p", join(*stops, sep=" "), cls="heat-scale", role="img", aria_label=f"Colours of ±{scale:g} nats")
    meaning = "Orange, dotted: less likely under the policy. Blue, underlined: more likely."
    return join(colours, tag("p", meaning, cls="subdued"))


def as_tokenized(pieces: Sequence[str], special: Container[int]) -> Html:
    """Returns a text with its whitespace and markers visible."""
    shown = [
        tag("span", visible(piece, "·"), cls="special" if index in special else None)
        for index, piece in enumerate(pieces)
    ]
    return tag("pre", shown, cls="as-tokenized", tabindex=0)


def visible(piece: str, space: str = " ") -> str:
    """A piece of text whose whitespace can be seen.

    >>> visible(" a" + chr(9), "·")
    '·a→'
    """
    return piece.replace(" ", space).replace("\t", "→").replace("\r", "␍").replace("\n", "↵\n")


def signed(value: float) -> str:
    """A difference with its sign; `-` for NaN.

    >>> signed(0.25), signed(math.nan)
    ('+0.250', '-')
    """
    return "-" if math.isnan(value) else f"{value:+.3f}"


def _token(name: str, one: Token, scale: float) -> Html:
    special = " special" if one.is_special else ""
    if one.is_context:
        return tag("span", visible(one.text), cls=f"context{special}")
    style = _style(one.value, scale, special)
    title = f"{one.text!r}: {signed(one.value)} nats"
    return tag("span", visible(one.text), **style, role="button", tabindex=-1, title=title, data_token=name)


def _style(value: float, scale: float, more: str = "") -> dict[str, str]:
    finite = 0.0 if math.isnan(value) else value
    way = "more" if finite > 0 else "less" if finite < 0 else "even"
    return {"cls": f"token {way}{more}", "style": f"--w:{min(1.0, abs(finite) / scale):.3f}"}


def word_diff(left: str, right: str, *, strike: bool = True) -> tuple[Html, Html]:
    """Returns both texts with their own words underlined; those of the second are struck through, unless told else.

    >>> word_diff("a good day", "a bad day")
    ('a <ins>good</ins> day', 'a <del>bad</del> day')
    """
    one, other = PIECES.findall(left), PIECES.findall(right)
    if max(len(one), len(other)) > COMPARED:
        return join(left), join(right)
    first: list[Child] = []
    second: list[Child] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        for parts, mark, text in ((first, "ins", one[a:b]), (second, "del" if strike else "ins", other[c:d])):
            parts.append("".join(text) if kind == "equal" or not text else tag(mark, "".join(text)))
    return join(first), join(second)
