"""Prefetching: results in order, once each, bounded depth, errors at the right step, no thread left."""

from __future__ import annotations

import threading
import time

import pytest

from nnxdsl.errors import DataError
from nnxdsl.runtime.prefetch import Prefetch
from tests.waiting import wait_until


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_every_step_gets_its_own(depth: int) -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step * step

    with Prefetch(make, 10, depth) as ahead:
        assert [ahead.get(step) for step in range(3, 10)] == [step * step for step in range(3, 10)]
    assert made == list(range(3, 10))
    assert not threads()


def test_no_more_than_the_depth_are_made_beside_the_one_taken() -> None:
    made: list[int] = []
    with Prefetch(made.append, 100, 2) as ahead:
        ahead.get(7)
        wait_until(lambda: len(made) == 3)
        time.sleep(0.02)
        assert made == [7, 8, 9]


def test_any_step_may_be_asked_for() -> None:
    with Prefetch(lambda step: step, 100, 2) as ahead:
        assert [ahead.get(step) for step in (5, 6, 3, 50, 51)] == [5, 6, 3, 50, 51]


def test_an_error_comes_at_the_step_that_needs_it_with_its_message() -> None:
    def make(step: int) -> int:
        if step == 4:
            raise DataError("rows.jsonl:12: gone")
        return step

    with Prefetch(make, 10, 2) as ahead:
        assert [ahead.get(step) for step in (2, 3)] == [2, 3]  # step 4 has failed by now, or will
        with pytest.raises(DataError, match=r"rows\.jsonl:12: gone"):
            ahead.get(4)
    assert not threads()


def test_the_thread_ends_when_the_consumer_fails() -> None:
    def consume() -> None:
        with Prefetch(lambda step: step, 1000, 2) as ahead:
            ahead.get(0)
            raise KeyError

    with pytest.raises(KeyError):
        consume()
    assert not threads()
