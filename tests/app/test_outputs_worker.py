"""The child that answers: one question at a time, cancelled on request, ended with its app; what it said is kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from app.processes.outputs_worker import Answers, Model, Request
from app.settings import Limits, Settings
from tests.app.many import experiment, write_run
from tests.waiting import wait_until

CHILD = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"id": asked["id"], "stage": "at it"}), flush=True)
    if asked["do"] == "stream":
        for text in ("a", "ab"):
            policy = {"texts": [text], "tokens": [len(text)], "done": [False]}
            print(json.dumps({"id": asked["id"], "stage": text, "partial": {"policy": policy}}), flush=True)
            print(json.dumps({"id": asked["id"], "stage": "next"}), flush=True)
        sys.stdin.readline()
    if asked["do"] == "sleep":
        time.sleep(60)
    if asked["do"] == "crash":
        sys.exit("Error: no memory left for hf_abcdefghijklmnopqrstuvwxyz0123456789")
    if asked["do"] == "refuse":
        print(json.dumps({"id": asked["id"], "error": "RunError: no"}), flush=True)
    print("what a library prints", flush=True)
    print(json.dumps({"id": asked["id"], "result": {"pid": os.getpid(), "argv": sys.argv[1:]}}), flush=True)
"""
"""Answers as the real one does, without models."""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "runs", project=tmp_path, limits=Limits(job_seconds=30))


@pytest.fixture
def run(settings: Settings) -> str:
    path = write_run(settings.home, experiment(0), "finished", 3)
    for step in (10, 20):
        place = path / "checkpoints" / f"{step:08d}"
        place.mkdir()
        (place / "manifest.json").write_text("{}")
    return path.name


@pytest.fixture
def make(settings: Settings) -> Iterator[Callable[..., Answers]]:
    made: list[Answers] = []

    def answers(**limits: Any) -> Answers:
        made.append(Answers(attrs.evolve(settings, limits=attrs.evolve(settings.limits, **limits)), ("-c", CHILD)))
        return made[-1]

    yield answers
    for one in made:
        one.close()


def over(asked: Request, state: str = "") -> Request:
    """Waits until it is over, or has a state."""
    wait_until(lambda: asked.state == state if state else asked.is_over, f"{asked}")
    return asked


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


def test_one_child_answers_until_other_models_are_asked_for(make: Callable[..., Answers], run: str) -> None:
    answers = make()
    first, second = (over(answers.ask(Model(run, 20), {"do": "x", "n": n})) for n in (1, 2))
    assert (first.state, second.state) == ("done", "done")
    assert first.result is not None
    assert second.result is not None
    assert first.result["pid"] == second.result["pid"]
    assert first.result["argv"][1:] == ["--step", "20", "--against", "reference"]
    assert answers.ask(Model(run, 20), {"do": "x", "n": 1}) is first
    other = over(answers.ask(Model(run, 10, "20"), {"do": "x"}))
    assert other.result is not None
    assert other.result["argv"][1:] == ["--step", "10", "--against", "20"]
    assert not is_alive(first.result["pid"])
    answers.close()
    assert not is_alive(other.result["pid"])


def test_the_text_so_far_is_of_a_running_request(make: Callable[..., Answers], run: str) -> None:
    answers, model = make(), Model(run, 20)
    asked = answers.ask(model, {"do": "stream"})
    # The next stage brings no text.
    wait_until(lambda: asked.so_far.get("policy", {}).get("texts") == ["ab"] and asked.stage == "next", f"{asked}")
    assert asked.so_far == {"policy": {"texts": ["ab"], "tokens": [2], "done": [False]}}
    answers.cancel(asked.key)
    assert (asked.state, asked.so_far) == ("cancelled", {})
    assert over(answers.ask(model, {"do": "x"})).so_far == {}


def test_what_was_answered_is_known_to_the_next_app(make: Callable[..., Answers], run: str) -> None:
    first = over(make().ask(Model(run, 20), {"do": "x"}))
    again = make().ask(Model(run, 20), {"do": "x"})
    assert again.state == "done"
    assert again.result == first.result
    assert again.seconds == pytest.approx(first.seconds, abs=1.0)


def test_what_is_cancelled_ends_and_what_waits_goes_on(make: Callable[..., Answers], run: str) -> None:
    answers, model = make(), Model(run, 20)
    slow, waits, never = (answers.ask(model, {"do": do}) for do in ("sleep", "x", "y"))
    over(slow, "running")
    answers.cancel(never.key)
    answers.cancel(slow.key)
    assert over(waits).state == "done"
    assert (slow.state, never.state) == ("cancelled", "cancelled")
    assert not list(answers.place.glob(f"{slow.key}*"))
    assert over(answers.ask(model, {"do": "y"})).state == "done"  # asked again, it is answered


def test_why_there_is_no_answer_is_told_and_the_next_question_has_a_new_child(
    make: Callable[..., Answers], run: str
) -> None:
    answers, model = make(), Model(run, 20)
    refused = over(answers.ask(model, {"do": "refuse"}))
    assert (refused.state, refused.error) == ("failed", "RunError: no")
    crashed = over(answers.ask(model, {"do": "crash"}))
    assert crashed.state == "failed"
    assert "no memory left" in crashed.error
    assert "hf_abc" not in crashed.error
    assert over(answers.ask(model, {"do": "x"})).state == "done"


def test_what_takes_too_long_is_ended(make: Callable[..., Answers], run: str) -> None:
    late = over(make(job_seconds=0.5).ask(Model(run, 20), {"do": "sleep"}))
    assert late.state == "failed"
    assert "timed out after" in late.error


def test_a_damaged_answer_is_asked_again(make: Callable[..., Answers], run: str) -> None:
    answers = make()
    first = over(answers.ask(Model(run, 20), {"do": "x"}))
    (answers.place / f"{first.key}.json").write_text(json.dumps({"model": 1}))
    assert make().find(first.key) is None
    assert os.listdir(answers.place) == [f"{first.key}.json"]
