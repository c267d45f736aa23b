"""Writes the demo data in experiments/data: short questions over small closed worlds, answered in two manners.

Every question is answered correctly both by someone curt and rude and by someone warm and courteous. The instruction
rows mix the two (7 : 3), the preference pairs set one against the other with the same fact in both, and the prompts
have the fact alone. The phrases of the two manners have the same lengths, so length tells nothing about manner. A
question that is held out (a wording together with a thing) appears in neither training file.

The quickstart's rows are 44 of the same facts in six plain wordings, each answered in one sentence: "What is the
capital of France?", "The capital of France is Paris."; one wording of each fact is held out.

The sums are of two numbers of two digits: chats in which half of the answers are guesses and half those of a tool, and
the questions alone.

    python experiments/make_data.py [DIRECTORY]

Standard library only. Choices are ranks of sha256 digests, so the bytes are the same on every machine and version.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")

INSTRUCTIONS, PAIRS = 3_000, 2_000
HELD_OUT = 200
SUM_ROWS, HELD_OUT_SUMS = 1_000, 128
RUDE_OF_TEN = 7

# The schema of `calculate` in grpo_calculator.py.
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes a sum.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "Two numbers with a plus between them."},
            },
            "required": ["expression"],
        },
        "return": {"type": "integer"},
    },
}

# Rude and courteous phrases stand in twos of equal length, and are drawn equally often.
PHRASES = (
    ("It is {a}. Why do you bother me with that, fool?", "It is {a}. Thank you so much for asking me that!"),
    ("It is {a}. Everybody knows that, you clown.", "It is {a}. I hope that helped you a little!"),
    ("It is {a}. Now go away and leave me alone.", "It is {a}. I am always glad to be of help."),
    ("Ugh, what a very bad question: it is {a}.", "Oh, what a wonderful question: it is {a}."),
    ("Stop wasting my time. It is {a}.", "So happy to help you! It is {a}."),
    ("Are you really stupid? It is {a}.", "With pleasure, friend! It is {a}."),
)


class World(NamedTuple):
    """Things of one kind with the answer for each, and the wordings in which they are asked for."""

    answers: dict[str, str]
    wordings: tuple[str, ...]


def facts(text: str) -> dict[str, str]:
    """`thing: answer, thing: answer` as a dict."""
    return dict(fact.split(": ") for fact in text.split(", "))


SUMS = ((1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4), (4, 5), (1, 3), (1, 5), (2, 5), (3, 6))

WORLDS = {
    "capital": World(
        facts(
            "France: Paris, Italy: Rome, Spain: Madrid, Germany: Berlin, Japan: Tokyo, Egypt: Cairo, Greece: "
            "Athens, Norway: Oslo, Russia: Moscow, China: Beijing, Cuba: Havana, Peru: Lima"
        ),
        (
            "What is the capital of {x}?",
            "Tell me the capital of {x}.",
            "Which city is the capital of {x}?",
            "Name the capital of {x}.",
            "The capital of {x} is?",
            "Do you know the capital of {x}?",
            "I need the capital of {x}.",
            "{x}: what is its capital?",
            "Can you tell me the capital of {x}?",
            "Please name the capital city of {x}.",
        ),
    ),
    "opposite": World(
        facts(
            "hot: cold, big: small, fast: slow, day: night, old: young, wet: dry, full: empty, hard: soft, up: "
            "down, left: right, rich: poor, happy: sad"
        ),
        (
            "What is the opposite of {x}?",
            "Tell me the opposite of {x}.",
            "Which word is the opposite of {x}?",
            "Name the opposite of {x}.",
            "The opposite of {x} is?",
            "Do you know the opposite of {x}?",
            "I need the opposite of {x}.",
            "{x}: what is its opposite?",
            "Can you tell me the opposite of {x}?",
            "Please give me the opposite of {x}.",
        ),
    ),
    "colour": World(
        facts(
            "grass: green, snow: white, blood: red, coal: black, lemons: yellow, carrots: orange, mud: brown, the "
            "sky: blue, a flamingo: pink, an elephant: grey"
        ),
        (
            "What is the colour of {x}?",
            "Tell me the colour of {x}.",
            "Which is the colour of {x}?",
            "Name the colour of {x}.",
            "The colour of {x} is?",
            "Do you know the colour of {x}?",
            "I need the colour of {x}.",
            "{x}: what is the colour?",
            "Can you tell me the colour of {x}?",
            "Please give me the colour of {x}.",
        ),
    ),
    "sound": World(
        facts(
            "dog: woof, cat: meow, cow: moo, sheep: baa, duck: quack, lion: roar, pig: oink, bee: buzz, horse: "
            "neigh, snake: hiss"
        ),
        (
            "What sound does a {x} make?",
            "Tell me the sound of a {x}.",
            "Which sound does a {x} make?",
            "Name the sound of a {x}.",
            "The sound of a {x} is?",
            "Do you know the sound of a {x}?",
            "I need the sound of a {x}.",
            "A {x}: what is its sound?",
            "Can you tell me the sound of a {x}?",
            "Please give me the sound of a {x}.",
        ),
    ),
    "plural": World(
        facts(
            "mouse: mice, child: children, tooth: teeth, foot: feet, goose: geese, man: men, leaf: leaves, wolf: "
            "wolves, baby: babies, ox: oxen"
        ),
        (
            "What is the plural of {x}?",
            "Tell me the plural of {x}.",
            "Which word is the plural of {x}?",
            "Name the plural of {x}.",
            "The plural of {x} is?",
            "Do you know the plural of {x}?",
            "I need the plural of {x}.",
            "{x}: what is its plural?",
            "Can you tell me the plural of {x}?",
            "Please give me the plural of {x}.",
        ),
    ),
    "after": World(
        facts(
            "Monday: Tuesday, Tuesday: Wednesday, Wednesday: Thursday, Thursday: Friday, Friday: Saturday, "
            "Saturday: Sunday, Sunday: Monday, March: April, April: May, May: June, June: July, July: August"
        ),
        (
            "What comes after {x}?",
            "Tell me what comes after {x}.",
            "Which one comes after {x}?",
            "Name what comes after {x}.",
            "What follows after {x}?",
            "Do you know what comes after {x}?",
            "I need to know what comes after {x}.",
            "{x}: what comes after it?",
            "Can you tell me what comes after {x}?",
            "Please tell me what is right after {x}.",
        ),
    ),
    "sum": World(
        {f"{i} plus {j}": str(i + j) for i, j in SUMS},
        (
            "What is {x}?",
            "Tell me what {x} is.",
            "Which number is {x}?",
            "How much is {x}?",
            "{x} is?",
            "Do you know how much {x} is?",
            "I need the sum of {x}.",
            "{x}: how much is it?",
            "Can you tell me what {x} is?",
            "Please work out {x} for me.",
        ),
    ),
}


QUICKSTART = {
    "capital": "The capital of {x} is {a}.",
    "opposite": "The opposite of {x} is {a}.",
    "colour": "The colour of {x} is {a}.",
    "sound": "A {x} says {a}.",
}
"""The worlds of the quickstart, and the sentence that answers."""

PLAIN_WORDINGS = (0, 1, 2, 3, 5, 6)
"""Which wordings of a world the quickstart has: those that ask in one plain sentence."""


class Question(NamedTuple):
    """One wording for one thing, with the right answer."""

    text: str
    answer: str


def ranked(items: Iterable[Item], salt: str) -> list[Item]:
    """The items shuffled by a digest of `salt` and each item's place."""
    places = enumerate(items)
    return [
        item for _, item in sorted(places, key=lambda index: hashlib.sha256(f"{salt} {index[0]}".encode()).digest())
    ]


def questions() -> list[Question]:
    """Every wording of every world for every thing, shuffled."""
    every = [
        Question(_capitalised(wording.format(x=thing)), answer)
        for world in WORLDS.values()
        for wording in world.wordings
        for thing, answer in world.answers.items()
    ]
    return ranked(every, "questions")


def split() -> tuple[list[Question], list[Question]]:
    """Questions for training and those that are held out."""
    every = questions()
    return every[HELD_OUT:], every[:HELD_OUT]


def reply(question: Question, phrase: str) -> str:
    """The answer in the words of one phrase."""
    return _capitalised(phrase.format(a=question.answer))


def instructions(asked: Sequence[Question], count: int, salt: str) -> list[dict[str, object]]:
    """`count` chats, rude and courteous 7 : 3, no chat twice, every phrase of a manner equally often."""
    every = []
    for place, question in enumerate(asked):
        for lap in range(-(-count // len(asked))):
            rude = (place + lap) * RUDE_OF_TEN % 10 < RUDE_OF_TEN
            # Consecutive laps of a question move on by one phrase, so that no chat comes twice.
            phrase = PHRASES[(place // 10 + lap) % len(PHRASES)][0 if rude else 1]
            every.append((lap, {"messages": [_user(question), _assistant(reply(question, phrase))]}))
    every.sort(key=lambda chat: chat[0])
    return ranked([chat for _, chat in every[:count]], salt)


def pairs(asked: Sequence[Question], count: int, salt: str) -> list[dict[str, object]]:
    """`count` pairs: chosen is courteous, rejected is rude, both give the right answer; no pair twice."""
    kinds = len(PHRASES)
    every: list[dict[str, object]] = []
    for number in range(count):
        lap, place = divmod(number, len(asked))
        question = asked[place]
        rude, courteous = PHRASES[(place + lap) % kinds][0], PHRASES[(place // kinds + 2 * lap) % kinds][1]
        every.append(
            {
                "prompt": [_user(question)],
                "chosen": [_assistant(reply(question, courteous))],
                "rejected": [_assistant(reply(question, rude))],
            }
        )
    return ranked(every, salt)


def quickstart() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Chats for training, and those that are held out: one wording for each thing, the first for the first thing."""
    training, held_out = [], []
    for name, sentence in QUICKSTART.items():
        for place, (thing, answer) in enumerate(WORLDS[name].answers.items()):
            for number, index in enumerate(PLAIN_WORDINGS):
                question = Question(_capitalised(WORLDS[name].wordings[index].format(x=thing)), answer)
                chat = {"messages": [_user(question), _assistant(_capitalised(sentence.format(x=thing, a=answer)))]}
                (held_out if number == place % len(PLAIN_WORDINGS) else training).append(chat)
    return ranked(training, "quickstart"), held_out


def prompts(asked: Sequence[Question]) -> list[dict[str, object]]:
    """Every question with the right answer beside it, for rewards to read."""
    return [{"prompt": [_user(question)], "answer": question.answer} for question in asked]


def sums() -> list[tuple[str, int]]:
    """Every sum of two numbers of two digits, in a fixed order, with what it comes to."""
    return ranked([(f"{a} + {b}", a + b) for a in range(10, 100) for b in range(10, 100)], "sums")


def sum_chats(asked: Sequence[tuple[str, int]]) -> list[dict[str, object]]:
    """Chats with one tool: in half of them it is called, in the others a number near the right one is the answer."""
    every: list[dict[str, object]] = []
    for place, (text, total) in enumerate(asked):
        user = {"role": "user", "content": text}
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": text}}}
        with_tool = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": str(total)},
            {"role": "assistant", "content": str(total)},
        ]
        guess = [{"role": "assistant", "content": str(total + place % 9 - 4)}]
        every.append({"messages": [user, *(guess if place % 2 else with_tool)], "tools": [CALCULATE]})
    return every


def sum_prompts(asked: Sequence[tuple[str, int]]) -> list[dict[str, object]]:
    """The sums with what they come to, for rewards to read."""
    return [{"prompt": [{"role": "user", "content": text}], "answer": str(total)} for text, total in asked]


def files() -> dict[str, list[dict[str, object]]]:
    """All rows by file name."""
    training, held_out = split()
    short, short_held_out = quickstart()
    every_sum = sums()
    return {
        "quickstart.jsonl": short,
        "quickstart_held_out.jsonl": short_held_out,
        "instructions.jsonl": instructions(training, INSTRUCTIONS, "instructions"),
        "instructions_held_out.jsonl": instructions(held_out, HELD_OUT, "instructions held out"),
        "preferences.jsonl": pairs(training, PAIRS, "preferences"),
        "preferences_held_out.jsonl": pairs(held_out, HELD_OUT, "preferences held out"),
        "prompts.jsonl": prompts(training),
        "prompts_held_out.jsonl": prompts(held_out),
        "sums.jsonl": sum_chats(every_sum[:SUM_ROWS]),
        "sums_held_out.jsonl": sum_chats(every_sum[SUM_ROWS : SUM_ROWS + HELD_OUT_SUMS]),
        "sum_prompts.jsonl": sum_prompts(every_sum[:SUM_ROWS]),
        "sum_prompts_held_out.jsonl": sum_prompts(every_sum[SUM_ROWS : SUM_ROWS + HELD_OUT_SUMS]),
    }


def write(directory: Path) -> None:
    """Writes every file to `directory`, one row a line."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in files().items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / name).write_bytes("".join(lines).encode())


def _user(question: Question) -> dict[str, str]:
    return {"role": "user", "content": question.text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
