"""Ten steps with every objective against an independent replay in float64; `make_replay_objectives.py` has made it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from small_lab.replays import REPLAY, steps

from nnxdsl import Objective
from nnxdsl.config.core.base import members

STORED: dict[str, Any] = json.loads((REPLAY / "objectives.json").read_text())
LOSS, NORM = 2e-5, 1e-4
"""Largest relative differences of losses and of gradient norms over ten steps: float32 here, float64 there."""
CANCELLED = 5e-6
"""Largest difference of a loss that is what is left of terms of about 1."""
NATS = 2e-5
"""Largest difference of a log-probability of about 50 nats, and of a reward by `beta` of it."""
WIDE = 1e-5
"""Largest relative difference of any figure over ten steps, float64 on both sides (4e-6 seen)."""


def kinds(objective: dict[str, Any]) -> set[str]:
    return {objective["type"]} | {kind for term in objective.get("terms", ()) for kind in kinds(term)}


def test_every_objective_is_replayed() -> None:
    read = ("pairs", "feedback")  # reward models are compared with TRL's trainer: test_reward_model.py
    wanted = {name for name, cls in members(Objective).items() if cls.batch_kind in read and cls.reads_logps}
    assert set.union(*(kinds(case["objective"]) for case in STORED.values())) == wanted


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_steps_in_float64_equal_the_replay(on_eight_devices: Callable[..., Any]) -> None:
    """Loss, log-probabilities, rewards, margins and the gradient's norm of all steps of all objectives."""
    actual = on_eight_devices("program/on_float64.py")
    assert actual.keys() == STORED.keys()
    for name, case in STORED.items():
        for step, (ours, expected) in enumerate(zip(actual[name], case["steps"], strict=True)):
            assert ours.keys() == expected.keys()
            for key, value in expected.items():
                assert ours[key] == pytest.approx(value, rel=WIDE, abs=1e-12), (name, step, key)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_ten_steps_equal_the_replay(name: str) -> None:
    case = STORED[name]
    beta = case["objective"].get("beta", 1.0)
    for step, (actual, expected) in enumerate(zip(steps(case), case["steps"], strict=True)):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=LOSS, abs=CANCELLED), step
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM), step
        for key in expected.keys() - {"loss", "grad_norm"}:
            scale = beta if key.startswith("rewards/") else 1.0
            assert actual[key] == pytest.approx(expected[key], rel=1e-5, abs=max(scale, 0.01) * NATS), (step, key)
