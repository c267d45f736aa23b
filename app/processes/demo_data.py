"""Data of the app's demo runs: short questions, each with a rude and a polite answer. Independent of experiments.

Both answers state the same fact in phrases of the same length. SFT trains on both, DPO prefers the polite one. Rows are
chosen by the order of their digests, so they are the same on any machine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

PHRASES = (
    ("It is {}. Now leave me alone.", "It is {}. I am happy to help."),
    ("Stop asking that! It is {}.", "Glad to help you! It is {}."),
    ("Ugh, a bad question: it is {}.", "Oh, a fine question: it is {}."),
)
"""Pairs of a rude and a polite answer of equal length."""

FACTS = {
    "capital": "France: Paris, Italy: Rome, Spain: Madrid, Germany: Berlin, Japan: Tokyo, Egypt: Cairo, Norway: Oslo",
    "opposite": "hot: cold, big: small, fast: slow, day: night, old: young, wet: dry, full: empty, rich: poor",
    "colour": "grass: green, snow: white, blood: red, coal: black, lemons: yellow, mud: brown, the sky: blue",
    "sound": "a dog: woof, a cat: meow, a cow: moo, a sheep: baa, a duck: quack, a lion: roar, a bee: buzz",
    "plural": "mouse: mice, child: children, tooth: teeth, foot: feet, goose: geese, leaf: leaves, baby: babies",
}
WORDINGS = ("What is the {} of {}?", "Tell me the {} of {}.", "Name the {} of {}.", "I need the {} of {}.")
HELD_OUT = 24  # questions that are in no training row
PROMPTS = ("What is the capital of Germany?", "What is the opposite of hot?", "Tell me the sound of a cow.")


def write(place: Path) -> None:
    """Writes `instructions.jsonl`, `preferences.jsonl` and `preferences_held_out.jsonl`, each unless it exists."""
    questions = _questions()
    held_out, seen = questions[:HELD_OUT], questions[HELD_OUT:]
    rows = {
        "instructions": [_instruction(question, fact, way) for way in range(6) for question, fact in seen],
        "preferences": [_pair(question, fact, way) for way in range(3) for question, fact in seen],
        "preferences_held_out": [_pair(question, fact, way) for way, (question, fact) in enumerate(held_out)],
    }
    place.mkdir(parents=True, exist_ok=True)
    for name, values in rows.items():
        file = place / f"{name}.jsonl"
        if not file.exists():
            file.write_text("".join(f"{json.dumps(row)}\n" for row in values), encoding="utf-8")


def _questions() -> list[tuple[str, str]]:
    every: list[tuple[str, str]] = []
    for kind, facts in FACTS.items():
        for fact in facts.split(", "):
            thing, answer = fact.split(": ")
            every += [(wording.format(kind, thing), answer) for wording in WORDINGS]
    return sorted(every, key=lambda one: hashlib.sha256(one[0].encode()).digest())


def _instruction(question: str, fact: str, way: int) -> dict[str, object]:
    return {"messages": [*_message("user", question), *_message("assistant", PHRASES[way % 3][way // 3].format(fact))]}


def _pair(question: str, fact: str, way: int) -> dict[str, object]:
    rude, polite = (_message("assistant", phrase.format(fact)) for phrase in PHRASES[way % 3])
    return {"prompt": _message("user", question), "chosen": polite, "rejected": rude}


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]
