"""Calls of reward functions: asynchronous ones run together, and each call ends within its time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nnxdsl import PlanError, Reward, RunError, reward
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data.rewards import Rewards, Sampled, Scores

HANGS = 60.0
"""Longer than any test waits: a hanging function is given up."""


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    before = dict(functions)
    yield
    functions.clear()
    functions.update(before)


def scored(*rewards: Reward, texts: tuple[str, ...] = ("a", "b", "c", "d")) -> Scores:
    ids = [f"x.jsonl:{number}" for number in range(1, len(texts) + 1)]
    return Rewards(rewards).score(Sampled(texts, [[1]] * len(texts), [{"prompt": ""}] * len(texts), ids))


@pytest.mark.parametrize("limit", [1, 2, 64])
def test_asynchronous_calls_run_together_up_to_a_number(limit: int) -> None:
    running, most = 0, 0

    @reward("waits")
    async def waits(completion: str, log_metric: Any) -> float | None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05 if completion == "a" else 0.001)  # the first one ends last
        running -= 1
        log_metric("code", ord(completion))
        return None if completion == "b" else float(ord(completion))

    scores = scored(Reward("waits", max_concurrency=limit))
    assert most == min(limit, 4)
    assert [str(each[0]) for each in scores.values] == ["97.0", "nan", "99.0", "100.0"]
    assert scores.metrics == {"code": [97.0, 98.0, 99.0, 100.0]}  # in the order of completions, whichever ends first


def test_asynchronous_functions_run_while_others_do() -> None:
    """Each waits for others: one after another, they would never end."""
    first, second, third = threading.Event(), threading.Event(), threading.Event()

    async def seen(event: threading.Event) -> float:
        while not event.is_set():
            await asyncio.sleep(0.001)
        return 1.0

    @reward("one")
    async def one(completions: list[str]) -> list[float]:
        first.set()
        await seen(third)
        return [await seen(second)] * len(completions)

    @reward("two")
    async def two(completion: str) -> float:
        second.set()
        return await seen(first)

    @reward("three")
    def three(completion: str) -> float:
        third.set()
        return float(first.wait(HANGS))

    for names in (("three", "one", "two"), ("one", "two", "three")):
        first.clear()
        second.clear()
        third.clear()
        assert scored(*map(Reward, names)).values == [[1.0] * 3] * 4


def test_all_asynchronous_functions_have_one_event_loop() -> None:
    """A client that a function keeps belongs to the loop of its first call."""
    loops = []

    @reward("loop")
    async def loop(completion: str) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    scored(Reward("loop"))
    scored(Reward("loop"))
    assert len(loops) == 8
    assert len(set(loops)) == 1


def sleeps(completion: str) -> float:
    time.sleep(HANGS if completion == "c" else 0)
    return 1.0


def sleeps_for_all(completions: list[str]) -> list[float]:
    time.sleep(HANGS)
    return [1.0 for _ in completions]


async def awaits(completion: str) -> float:
    await asyncio.sleep(HANGS if completion == "c" else 0)
    return 1.0


async def awaits_for_all(completions: list[str]) -> list[float]:
    await asyncio.sleep(HANGS)
    return [1.0 for _ in completions]


ONE = r"^x.jsonl:3: reward 'hangs' has not returned within timeout=0.2 s; the completion was 'c'$"
ALL = r"^x.jsonl:1 ... x.jsonl:4: reward 'hangs' has not returned within timeout=0.2 s$"


@pytest.mark.parametrize(
    ("function", "message"), [(sleeps, ONE), (sleeps_for_all, ALL), (awaits, ONE), (awaits_for_all, ALL)]
)
def test_a_function_that_hangs_ends_by_its_name(function: Any, message: str) -> None:
    reward("hangs")(function)
    began = time.monotonic()
    with pytest.raises(RunError, match=message):
        scored(Reward("hangs", timeout=0.2))
    assert time.monotonic() - began < HANGS / 2


def test_an_asynchronous_function_that_blocks_the_loop_ends_by_its_name() -> None:
    @reward("blocks")
    async def blocks(completion: str) -> float:
        time.sleep(3 if completion == "a" else 0)  # other functions of the loop wait as well, so it is short
        return 1.0

    with pytest.raises(RunError, match=r"^x.jsonl:1: reward 'blocks' has not returned within timeout=0.1 s"):
        scored(Reward("blocks", timeout=0.1), texts=("a", "b"))


def test_time_is_counted_for_each_call() -> None:
    reward("slow")(lambda completion: time.sleep(0.6) or 1.0)
    assert scored(Reward("slow", timeout=2)).values == [[1.0]] * 4  # 2.4 s together


def test_an_error_of_a_function_is_none_of_time() -> None:
    @reward("gives up")
    async def gives_up(completion: str) -> float:
        raise TimeoutError("the judge is busy")

    with pytest.raises(RunError, match=r"failed with TimeoutError: the judge is busy; the completion was 'a'$"):
        scored(Reward("gives up"), texts=("a",))


def test_without_a_limit_a_function_is_called_in_this_thread() -> None:
    threads = []
    reward("where")(lambda completion: threads.append(threading.current_thread()) or 1.0)
    scored(Reward("where", timeout=None), texts=("a",))
    scored(Reward("where"), texts=("a",))
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_a_function_that_exits_is_heard_of() -> None:
    @reward("exits")
    def exits(completion: str) -> float:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        scored(Reward("exits"))

    @reward("exits later")
    async def exits_later(completion: str) -> float:
        raise SystemExit(3)

    with pytest.raises(RunError, match="reward 'exits later' failed with SystemExit: 3; the completion was 'a'"):
        scored(Reward("exits later"))


def test_concurrency_without_effect_is_refused() -> None:
    reward("plain")(lambda completion: 1.0)

    @reward("once")
    async def once(completions: list[str]) -> list[float]:
        return [1.0]

    with pytest.raises(PlanError) as error:
        Rewards((Reward("plain", max_concurrency=2), Reward("once", max_concurrency=2)))
    assert "objective.rewards.0.max_concurrency: has no effect: the function of 'plain' is not" in str(error.value)
    assert "objective.rewards.1.max_concurrency: has no effect" in str(error.value)
