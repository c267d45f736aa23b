"""A text token by token: `log p(policy) - log p(other)` of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...components.charts import Line, Mark, chart
from ...html import Child, Html, join, link, tag
from ...words import number
from .generate import called, visible

SCALES = ("0.1", "0.5", "2", "5")
"""Limits of the colour scale, in nats; fixed choices, so that texts are comparable."""

SCALE = "2"
SHOWN = 2_000
"""Maximum number of tokens that are drawn; a download has all."""

EXACT = 3
"""Decimals of values in nats."""


def tokens(key: str, result: Mapping[str, Any], query: Mapping[str, str]) -> Html:
    """Returns the heat map of each text, its sums, and the cumulative difference."""
    scale = query.get("scale", SCALE)
    scale = scale if scale in SCALES else SCALE
    both = [_side(number_, side, result, float(scale)) for number_, side in enumerate(result["sides"])]
    return join(_margin(result), _legend(result, scale), tag("div", both, cls="panes"), _detail(result), _saved(key))


def _margin(result: Mapping[str, Any]) -> Html | None:
    """Components of a pair's reward margin."""
    sums = {side["name"]: _sum(side["policy"]) - _sum(side["other"]) for side in result["sides"]}
    if set(sums) != {"chosen", "rejected"}:
        return None
    margin = sums["chosen"] - sums["rejected"]
    words = (
        f"Log-ratio of the chosen answer {_signed(sums['chosen'])}, of the rejected one {_signed(sums['rejected'])}: "
    )
    words += f"difference {_signed(margin)} nats"
    return tag("p", words, f", {'right' if margin > 0 else 'wrong'}.", cls="notice")


def _legend(result: Mapping[str, Any], scale: str) -> Html:
    end = float(scale)
    stops = [_cell(f"{end * part:+g}" if part else "0", end * part, end) for part in (-1, -0.5, 0, 0.5, 1)]
    options = [
        tag("option", f"±{one} nats", value="" if one == SCALE else one, selected=one == scale) for one in SCALES
    ]
    return tag(
        "div",
        tag("span", "Orange, dotted: less likely under the policy", cls="small"),
        tag("span", stops, cls="scale", role="img", aria_label=f"Colours from {-end:+g} to {end:+g} nats"),
        tag("span", "Blue, underlined: more likely", cls="small"),
        tag("form", tag("label", "Scale ", tag("select", options, name="scale")), data_query=True),
        tag("span", f"Policy at step {result['step']:,} minus {result['against']}, in nats.", cls="small muted"),
        cls="row heat-legend",
    )


def _side(place: int, side: Mapping[str, Any], result: Mapping[str, Any], scale: float) -> Html:
    begin, special = side["begin"], set(side["special"])
    differences = _differences(side)
    parts: list[Child] = []
    for at, piece in enumerate(side["pieces"][:SHOWN]):
        if at < begin:
            parts.append(tag("span", visible(piece), cls="context marker" if at in special else "context"))
        else:
            parts.append(_token(at, piece, side, at - begin, differences[at - begin], scale, at in special))
        if piece.endswith("\n"):
            parts.append(tag("span", cls="line-end", aria_hidden="true"))
    beyond = sum(one is not None and abs(one) > scale for one in differences)
    notes: list[Child] = []
    if beyond:
        notes.append(
            f"{beyond} of {len(differences)} tokens exceed ±{scale:g} and are clipped to the end of the scale. "
        )
    if len(side["pieces"]) > SHOWN:
        notes.append(f"The first {SHOWN:,} of {len(side['pieces']):,} tokens are drawn; the download has all.")
    name = {"text": "Text", "chosen": "Chosen", "rejected": "Rejected"}.get(str(side["name"]), str(side["name"]))
    policy, other = _sum(side["policy"]), _sum(side["other"])
    sums: list[tuple[str, Child]] = [
        ("Policy", f"{policy:.{EXACT}f} nats"),
        (called(str(result["against"])), f"{other:.{EXACT}f} nats"),
        ("Difference", f"{_signed(policy - other)} nats over {len(differences)} tokens"),
        ("Per token", _signed((policy - other) / len(differences)) if differences else "-"),
    ]
    heat = tag("div", parts, cls="heat", role="group", aria_label=f"{name}: tokens", data_heat=place)
    return tag(
        "section",
        tag("h2", name),
        tag("dl", [tag("div", tag("dt", one), tag("dd", figure)) for one, figure in sums], cls="sums"),
        heat,
        tag("p", notes, cls="small muted") if notes else None,
        _growth(differences),
        cls="panel heat-panel",
    )


def _token(
    at: int, piece: str, side: Mapping[str, Any], place: int, difference: float | None, scale: float, is_special: bool
) -> Html:
    policy, other = side["policy"][place], side["other"][place]
    likeliest = side.get("likeliest") or {}
    data = {
        "n": at,
        "text": visible(piece),
        "lp": [_rounded(policy), _rounded(other)],
        "best": {
            name: [[visible(text), _rounded(mine), _rounded(theirs)] for text, mine, theirs in rows[place]]
            for name, rows in likeliest.items()
        },
    }
    spoken = f"{piece!r}: {_signed(difference)} nats"
    shown = tag("span", visible(piece).rstrip("\n") or "·", cls="marker piece" if is_special else "piece")
    figure = tag("span", "-" if difference is None else f"{difference:+.2f}", cls="figure")
    return tag(
        "span",
        shown,
        figure,
        cls=f"token {_direction(difference)}",
        style=f"--w:{_weight(difference, scale):.3f}",
        tabindex=0 if place == 0 else -1,
        role="button",
        aria_label=spoken,
        title=spoken,
        data_token=data,
    )


def _cell(text: str, value: float, scale: float) -> Html:
    return tag("span", text, cls=f"token {_direction(value)}", style=f"--w:{_weight(value, scale):.3f}")


def _direction(difference: float | None) -> str:
    return "even" if not difference else "more" if difference > 0 else "less"


def _weight(difference: float | None, scale: float) -> float:
    return 0.0 if difference is None else min(1.0, abs(difference) / scale)


def _growth(differences: Sequence[float | None]) -> Html:
    filled = np.array([0.0 if one is None else one for one in differences])
    if len(filled) < 2:
        return join()
    x = np.arange(1, len(filled) + 1)
    line = Line("cumulative difference", x, np.cumsum(filled))
    largest = int(np.abs(filled).argmax()) + 1
    marks = [Mark(largest, f"token {largest}: the largest difference, {_signed(float(filled[largest - 1]))}")]
    return chart("Cumulative difference by token", [line], marks=marks, x_name="token")


def _detail(result: Mapping[str, Any]) -> Html:
    words = "Choose a token, by a click or with the arrow keys, to see the most likely alternatives of both models."
    return tag(
        "section",
        tag("h2", "Token"),
        tag("div", tag("p", words, cls="muted"), id="token-detail", aria_live="polite"),
        cls="panel token-detail",
        data_other=str(result["against"]),
    )


def _saved(key: str) -> Html:
    kinds = (("csv", "Save as CSV"), ("jsonl", "Save as JSONL"))
    links = [
        tag("a", text, href=link("/download", outputs=key, format=kind), download=True, cls="button small")
        for kind, text in kinds
    ]
    return tag("p", links, cls="row")


def _differences(side: Mapping[str, Any]) -> list[float | None]:
    return [
        None if mine is None or theirs is None else mine - theirs
        for mine, theirs in zip(side["policy"], side["other"], strict=True)
    ]


def _sum(values: Sequence[float | None]) -> float:
    return sum(value for value in values if value is not None)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.{EXACT}f}"


def _rounded(value: float | None) -> str:
    return number(value) if value is None else f"{value:.{EXACT}f}"
