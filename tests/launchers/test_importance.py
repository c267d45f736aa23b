"""Importance of fields by Optuna: fields that decide a metric come first; with a page that draws them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from app.pages.sweeps.plots import importance
from app.store.sweeps import OpenedSweep, Point
from nnxdsl.errors import RunError
from nnxdsl.sweep.importance import importances

pytestmark = pytest.mark.launchers
pytest.importorskip("optuna")


def points(count: int) -> list[tuple[dict[str, str], float]]:
    """Points whose metric is decided by `lr` alone, best at 0.5; `steps` never differs."""
    draw = random.Random(0)
    result = [
        {"seed": str(draw.randrange(9)), "lr": repr(draw.random()), "kind": draw.choice(["'a'", "None"]), "steps": "3"}
        for _ in range(count)
    ]
    return [(changes, abs(float(changes["lr"]) - 0.5)) for changes in result]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_field_that_decides_comes_first(sign: int) -> None:
    shares = importances([(changes, sign * value) for changes, value in points(60)], minimize=sign > 0)
    assert next(iter(shares)) == "lr"
    assert shares["lr"] > 0.8
    assert set(shares) == {"lr", "seed", "kind"}
    assert sum(shares.values()) == pytest.approx(1, abs=1e-9)


def test_fields_that_not_all_points_have_are_left_out() -> None:
    mixed = [
        ({**changes, "extra": "1"} if number % 2 else changes, value)
        for number, (changes, value) in enumerate(points(20))
    ]
    assert "extra" not in importances(mixed, minimize=True)
    assert importances([({"a": "1"}, float(value)) for value in range(9)], minimize=True) == {}
    with pytest.raises(RunError, match="at least 4 points"):
        importances(points(3), minimize=True)


def test_the_page_draws_a_bar_for_each(tmp_path: Path) -> None:
    rows = [
        Point(n, f"run-{n}", changes, "finished", None, {"loss": value})
        for n, (changes, value) in enumerate(points(30))
    ]
    actual = OpenedSweep(tmp_path, "sweep", rows, "", "")
    rendered = importance(actual, "loss")
    assert rendered is not None
    (bars,) = rendered.data
    assert bars.y[-1] == "lr"
    assert importance(OpenedSweep(tmp_path, "sweep", rows[:3], "", ""), "loss") is None
