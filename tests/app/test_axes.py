"""What curves are drawn over: time is the sum of what steps took, in one unit for all runs that share a chart."""

from __future__ import annotations

import numpy as np

from app.components.metrics import axes, offered
from app.store.series import Columns


def run(steps: int, tokens: float, pace: float) -> dict[str, Columns]:
    index = [float(step) for step in range(steps)]
    return {
        "num_tokens": Columns(index, [tokens * (step + 1) for step in range(steps)]),
        "tokens/s": Columns(index, [pace] * steps),
        "loss": Columns(index, [1.0] * steps),
    }


def test_time_is_tokens_over_their_pace() -> None:
    slow, quick = run(100, 1_000, 100.0), run(100, 1_000, 1_000.0)
    one, other = axes("time", [slow, quick])
    assert one.name == other.name == "minutes of steps"
    np.testing.assert_allclose(one.values_at(np.array([0.0, 50.0, 99.0])), np.array([10.0, 510.0, 1000.0]) / 60)
    np.testing.assert_allclose(other.values_at(np.array([99.0])), [100 / 60])
    (alone,) = axes("time", [quick])
    assert alone.name == "seconds of steps"
    assert axes("time", [run(1_000, 1_000, 10.0)])[0].name == "hours of steps"


def test_a_pace_that_is_no_number_takes_its_neighbours() -> None:
    odd = run(4, 10, 10.0)
    odd["tokens/s"].values[2] = float("nan")
    odd["tokens/s"].values[1] = 0.0
    np.testing.assert_allclose(axes("time", [odd])[0].values_at(np.arange(4.0)), [1, 2, 3, 4])


def test_what_is_not_there_is_not_offered() -> None:
    whole, bare = run(3, 1, 1.0), {"loss": Columns([0.0], [1.0])}
    assert offered([whole]) == ("step", "tokens", "time")
    assert offered([whole, bare]) == ("step",)
    assert [axis.name for axis in axes("time", [whole, bare])] == ["step", "step"]
    assert axes("tokens", [whole])[0].values_at(np.array([1.0])) == 2
