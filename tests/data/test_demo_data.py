"""The demo data: the committed files are what the script writes, and have the documented properties."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from nnxdsl import Data
from nnxdsl.cli.load import load as load_experiment
from nnxdsl.data import BytesTokenizer, load

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FOLDER = EXPERIMENTS / "data"
RUDE = ("fool", "clown", "go away", "very bad question", "Stop wasting", "stupid")
COURTEOUS = ("Thank you", "helped you", "glad to be", "wonderful", "happy to help", "pleasure")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def chats(name: str) -> list[tuple[str, str]]:
    return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows(name)]


SUM_PROMPTS = ("sum_prompts.jsonl", "sum_prompts_held_out.jsonl")


def pairs(name: str) -> list[tuple[str, str, str]]:
    return [tuple(row[part][0]["content"] for part in ("prompt", "chosen", "rejected")) for row in rows(name)]


def is_rude(answer: str) -> bool:
    rude, courteous = (any(phrase in answer for phrase in phrases) for phrases in (RUDE, COURTEOUS))
    assert rude != courteous, answer
    return rude


def test_the_script_writes_the_committed_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(EXPERIMENTS / "make_data.py"), str(tmp_path)], check=True)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert written == {file.name: file.read_bytes() for file in FOLDER.iterdir()}
    assert all(len(content) < 700_000 for content in written.values())


def test_rows_are_many_and_no_two_are_equal() -> None:
    counts = {file.name: len(lines) for file in FOLDER.iterdir() if (lines := file.read_text().splitlines())}
    assert counts == {
        "instructions.jsonl": 3000,
        "instructions_held_out.jsonl": 200,
        "preferences.jsonl": 2000,
        "preferences_held_out.jsonl": 200,
        "prompts.jsonl": 580,
        "prompts_held_out.jsonl": 200,
        "quickstart.jsonl": 220,
        "quickstart_held_out.jsonl": 44,
        "sums.jsonl": 1000,
        "sums_held_out.jsonl": 128,
        "sum_prompts.jsonl": 1000,
        "sum_prompts_held_out.jsonl": 128,
    }
    for name in counts:
        lines = (FOLDER / name).read_text().splitlines()
        assert len(set(lines)) == len(lines)


def test_what_is_held_out_is_asked_nowhere_in_training() -> None:
    training = {row[0] for row in chats("instructions.jsonl") + pairs("preferences.jsonl")}
    held_out = {row[0] for row in chats("instructions_held_out.jsonl") + pairs("preferences_held_out.jsonl")}
    assert len(held_out) == 200
    assert not training & held_out


def test_instructions_are_rude_seven_times_of_ten_in_twelve_phrases() -> None:
    rude = [is_rude(answer) for _, answer in chats("instructions.jsonl")]
    assert statistics.mean(rude) == pytest.approx(0.7, abs=0.01)
    both = {question for question, answer in chats("instructions.jsonl") if is_rude(answer)} & {
        question for question, answer in chats("instructions.jsonl") if not is_rude(answer)
    }
    assert len(both) == len({question for question, _ in chats("instructions.jsonl")})
    for phrase in RUDE + COURTEOUS:
        assert sum(phrase in answer for _, answer in chats("instructions.jsonl")) >= 100


@pytest.mark.parametrize("name", ["preferences.jsonl", "preferences_held_out.jsonl"])
def test_chosen_is_courteous_rejected_is_rude_and_both_are_right(name: str) -> None:
    facts = {question: fact(answer) for question, answer in chats("instructions.jsonl")}
    facts |= {question: fact(answer) for question, answer in chats("instructions_held_out.jsonl")}
    for question, chosen, rejected in pairs(name):
        assert (is_rude(chosen), is_rude(rejected)) == (False, True)
        assert fact(chosen) == fact(rejected) == facts[question]


@pytest.mark.parametrize("part", ["", "_held_out"])
def test_prompts_have_the_fact_of_the_answers(part: str) -> None:
    facts = {question: fact(answer) for question, answer in chats(f"instructions{part}.jsonl")}
    asked = {row["prompt"][0]["content"]: row["answer"] for row in rows(f"prompts{part}.jsonl")}
    assert asked == facts


def test_the_quickstart_holds_one_question_out_of_every_fact() -> None:
    training, held_out = chats("quickstart.jsonl"), chats("quickstart_held_out.jsonl")
    assert not {question for question, _ in training} & {question for question, _ in held_out}
    assert sorted(answer for _, answer in training) == sorted(5 * [answer for _, answer in held_out])
    assert not [phrase for phrase in RUDE for _, answer in training if phrase in answer]


def test_half_of_the_sums_are_guessed_and_no_held_out_one_is_asked_in_training() -> None:
    asked = {name: {row["prompt"][0]["content"]: row["answer"] for row in rows(name)} for name in SUM_PROMPTS}
    training, held_out = (asked[name] for name in SUM_PROMPTS)
    assert not training.keys() & held_out.keys()
    assert all(str(sum(map(int, text.split(" + ")))) == answer for text, answer in (training | held_out).items())
    for name, sums in (("sums.jsonl", training), ("sums_held_out.jsonl", held_out)):
        guessed = [row["messages"] for row in rows(name) if len(row["messages"]) == 2]
        assert len(guessed) == len(sums) // 2
        assert sum(sums[user["content"]] == answer["content"] for user, answer in guessed) < 0.12 * len(guessed)


def test_the_quickstarts_prompts_are_held_out() -> None:
    evaluation = load_experiment(str(EXPERIMENTS / "quickstart.py"), Path("runs")).evaluation
    assert evaluation is not None
    assert set(evaluation.prompts) <= {question for question, _ in chats("quickstart_held_out.jsonl")}


def fact(answer: str) -> str:
    """What an answer says, without its manner."""
    _, _, rest = answer.replace("It is", "it is").partition("it is ")
    return rest.partition(".")[0]


def best_by_length(longer: list[int], shorter: list[int]) -> float:
    """Accuracy of the best rule of the form "at least n bytes long", fitted on the very data that it is tried on."""
    total = len(longer) + len(shorter)
    hits = [
        sum(n >= limit for n in longer) + sum(n < limit for n in shorter) for limit in range(max(longer + shorter) + 2)
    ]
    return max(*hits, *(total - hit for hit in hits)) / total


@pytest.mark.parametrize("name", ["preferences.jsonl", "preferences_held_out.jsonl"])
def test_length_does_not_tell_chosen_from_rejected(name: str) -> None:
    chosen = [len(row[1].encode()) for row in pairs(name)]
    rejected = [len(row[2].encode()) for row in pairs(name)]
    assert statistics.mean(chosen) == pytest.approx(statistics.mean(rejected), abs=0.5)
    assert best_by_length(chosen, rejected) < 0.55
    wins = sum((a > b) + 0.5 * (a == b) for a, b in zip(chosen, rejected, strict=True)) / len(chosen)
    assert wins == pytest.approx(0.5, abs=0.05)


def test_length_does_not_tell_manners_apart_in_the_instructions() -> None:
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for _, answer in chats("instructions.jsonl"):
        lengths[is_rude(answer)].append(len(answer))
    assert statistics.mean(lengths[True]) == pytest.approx(statistics.mean(lengths[False]), abs=0.5)


def test_sequences_are_short_and_nothing_is_odd() -> None:
    tokens = BytesTokenizer()
    for name in ("instructions", "instructions_held_out", "quickstart", "quickstart_held_out"):
        dataset = load(Data.Conversations(str(FOLDER / f"{name}.jsonl")), tokens)
        assert (dataset.report.dropped, dataset.report.odd, dataset.report.cut) == ({}, {}, {})
        assert dataset.shapes["length"] <= 120
    for name in ("preferences", "preferences_held_out"):
        dataset = load(Data.Preferences(str(FOLDER / f"{name}.jsonl")), tokens)
        assert (dataset.report.dropped, dataset.report.odd, dataset.report.cut) == ({}, {}, {})
        assert dataset.shapes == {"prompt": 64, "response": 56}
