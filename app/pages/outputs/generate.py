"""Two answers side by side: word differences, stop reasons, votes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...components.parts import action, facts
from ...html import Child, Html, join, link, tag
from ...processes.outputs_worker import Request
from ...processes.votes import are_equal
from ...state import Site
from ...words import number
from .request import Chosen
from .stats import wilson

WORDS = re.compile(r"\s+|\w+|[^\w\s]")
COMPARED = 4_000
"""Maximum number of words of an answer for which differences are marked."""

NAMES = {"policy": "Policy", "other": "Reference"}


def answers(here: Chosen, key: str, result: Mapping[str, Any], is_blind: bool, order: Sequence[str]) -> Html:
    """Returns both panes, the prompt as tokenized for the models, and the settings.

    Args:
        here: Run and checkpoint of the page.
        key: Key of the request.
        result: Response of the child process.
        is_blind: Whether the models' names are hidden.
        order: The two sides in display order while they are blind.
    """
    sides = list(order) if is_blind else ["policy", "other"]
    drawn = [[result[side], *result[side].get("more", ())] for side in sides]
    marked = [
        _marked(one["text"], other["text"], "ins" if is_blind else "del") for one, other in zip(*drawn, strict=True)
    ]
    is_same = are_equal(result)
    panes = [
        _pane(here, key, result, side, [texts[place] for texts in marked], "AB"[place] if is_blind else "")
        for place, side in enumerate(sides)
    ]
    count = "the same answer" if len(marked) == 1 else f"the same {len(marked)} answers"
    tie = " A vote on it counts as a tie." if is_blind else ""
    same = tag("p", f"Both gave {count}, token for token.{tie}", cls="notice") if is_same else None
    return join(
        same,
        tag("div", panes, cls="panes"),
        None if is_same else _legend(is_blind),
        tag("div", _prompt(result), _settings(result), cls="split"),
        None if is_blind else _saved(key),
    )


def vote_buttons(site: Site, here: Chosen, found: Request, is_blind: bool) -> Html:
    """Returns the vote buttons of a blind comparison, and the tally of all votes on these two models."""
    parts: list[Child] = []
    if is_blind and not site.settings.read_only:
        choices = (("a", "A is better"), ("tie", "No difference"), ("b", "B is better"))
        buttons = [action(text, "outputs.vote", data_key=found.key, data_choice=choice) for choice, text in choices]
        parts.append(tag("div", buttons, cls="row", role="group", aria_label="Which answer is better?"))
    tally = site.votes.tally(found.model)
    if any(tally.values()):
        decided = tally["policy"] + tally["other"]
        low, high = wilson(tally["policy"], decided)
        words = f"Blind votes on these two: policy {tally['policy']}, {_other(found)} {tally['other']}, "
        words += f"no difference {tally['tie']}."
        if decided:
            words += (
                f" The policy won {tally['policy'] / decided:.0%} of {decided} (95 % interval {low:.0%} to {high:.0%})."
            )
        parts.append(tag("p", words))
    return tag("section", tag("h2", "Votes"), parts, cls="panel votes") if parts else join()


def _other(found: Request) -> str:
    return "reference" if found.result is None else str(found.result["against"])


def _pane(here: Chosen, key: str, result: Mapping[str, Any], side: str, texts: Sequence[Html], letter: str) -> Html:
    """Answers of one side, one below another."""
    drawn = [result[side], *result[side].get("more", ())]
    many = len(drawn) > 1
    who: Child = f"{'Answers' if many else 'Answer'} {letter}"
    if not letter:
        who = f"Policy, step {result['step']:,}" if side == "policy" else called(str(result["against"]))
    parts: list[Child] = [tag("h2", who)]
    for place, (answer, text) in enumerate(zip(drawn, texts, strict=True), start=1):
        ended = f"stopped at {answer['stop']}" if answer["stop"] else f"truncated at {answer['tokens']} tokens"
        words: list[Child] = [tag("span", f"{place} of {len(drawn)}")] if many else []
        words += [tag("span", f"{answer['tokens']} tokens"), tag("span", ended)]
        if not letter:
            if place == 1:
                words.append(tag("span", f"{answer['seconds']:.2f} s", title="excluding compilation"))
            look = {**here.query, "tab": "tokens", "from": key, "side": side, "n": place if many else None}
            words.append(tag("a", "Its tokens", href=link("/outputs", **look)))
        shown = text if answer["text"] else tag("span", "(nothing)", cls="muted")
        parts += [tag("div", shown, cls="answer"), tag("p", words, cls="row small muted")]
    cls = f"panel pane {'many ' if many else ''}{'' if letter else side}".strip()
    return tag("section", parts, cls=cls)


def called(against: str) -> str:
    """Heading for the other side of a comparison; names of runs are unchanged."""
    return against if "," in against else against[:1].upper() + against[1:]


def _marked(left: str, right: str, other_mark: str) -> tuple[Html, Html]:
    """Marks word differences: those of the first text with `<ins>`, those of the second with `other_mark`."""
    one, other = WORDS.findall(left), WORDS.findall(right)
    if max(len(one), len(other)) > COMPARED:
        return join(left), join(right)
    first: list[Child] = []
    second: list[Child] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        left_part, right_part = "".join(one[a:b]), "".join(other[c:d])
        if kind == "equal":
            first.append(left_part)
            second.append(right_part)
            continue
        first.append(tag("ins", left_part) if left_part else None)
        second.append(tag(other_mark, right_part) if right_part else None)
    return join(first), join(second)


def _legend(is_blind: bool) -> Html:
    if is_blind:  # striking one of them out would bias the vote
        return tag("p", tag("ins", "Underlined"), ": in this answer only.", cls="small diff-legend")
    policy = (tag("ins", "Underlined"), ": in the policy's answer only. ")
    other = (tag("del", "Struck through"), ": in the other answer only.")
    return tag("p", policy, other, cls="small diff-legend")


def _prompt(result: Mapping[str, Any]) -> Html:
    special = set(result["special"])
    shown = [
        tag("span", visible(piece), cls="marker" if at in special else None)
        for at, piece in enumerate(result["prompt_pieces"])
    ]
    count = len(shown)
    summary = tag("summary", f"The prompt as tokenized for both models: {count:,} token{'' if count == 1 else 's'}")
    return tag(
        "details", summary, tag("pre", shown, cls="exact", tabindex=0), cls="panel", id="outputs-prompt", open=True
    )


def _settings(result: Mapping[str, Any]) -> Html:
    sampling = result["sampling"]
    greedy = not sampling["temperature"]
    rows: list[tuple[str, Child]] = [
        ("Temperature", "0: greedy decoding" if greedy else number(sampling["temperature"])),
        ("Top-k", sampling["top_k"] or "all tokens"),
        ("Top-p", sampling["top_p"] or "all tokens"),
        ("Max new tokens", f"{sampling['max_new_tokens']:,}"),
        ("Seed", "no effect at temperature 0" if greedy else f"{sampling['seed']}, the same for both"),
        ("Samples per model", 1 + len(result["policy"].get("more", ()))),
    ]
    return tag("section", tag("h2", "Sampling"), facts(rows), cls="panel")


def _saved(key: str) -> Html:
    as_jsonl = link("/download", outputs=key, format="jsonl")
    return tag("p", tag("a", "Save both as JSONL", href=as_jsonl, download=True, cls="button small"))


def visible(piece: str) -> str:
    """Replaces whitespace of a token by visible characters.

    >>> visible(" a" + chr(9))
    '·a→'
    """
    return piece.replace(" ", "·").replace("\t", "→").replace("\r", "␍").replace("\n", "↵\n")
