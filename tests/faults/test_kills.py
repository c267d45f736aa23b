"""Rows 1 to 4: killed at each named point and at random instants, no saved step is lost, and it ends bit-equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fault_lab import Lab, Nursery, Whole, make, rows
from online import POLICY, online_recipe
from soak import soak

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage.failpoints import POINTS

pytestmark = pytest.mark.faults

VISITS = {
    # Which visits are killed at, where it is not the first two: points that a run comes to many times.
    "file-written": (1, 4, 6, 9, 12, 16),
    "file-renamed": (1, 4, 6, 9, 12, 16),
    "status-unwritten": (1, 2, 3, 5, 7, 9),
    "status-written": (1, 2, 3, 5, 7, 9),
    "metrics-appended": (1, 4, 9, 12),
    "event-appended": (1, 3, 4),
    "evaluation-appended": (1, 2, 3),
    "sample-appended": (1, 3),
    "save-begun": (1, 2, 4),
    "save-started": (1, 2, 4),
    "save-written": (1, 2, 4),
    "manifest-digested": (1, 4),
    "manifest-written": (1, 4),
    "commit-unnamed": (1, 2, 4),
    "commit-renamed": (1, 2, 4),
    "commit-durable": (1, 2, 4),
    "run-made": (1,),
    "run-renamed": (1,),
    "lock-taken": (1,),
    "lock-recorded": (1,),
    "attempt-appended": (1,),
}
ELSEWHERE = ("rows-copied", "rows-dropped", "commit-replaced", "processes-joined")
"""Points that only a run which goes on, or one in several processes, comes to; they have tests of their own."""

KILLS = [f"{point}@{visit}" for point in POINTS if point not in ELSEWHERE for visit in VISITS.get(point, (1, 2))]


@pytest.mark.parametrize("point", KILLS)
def test_killed_at_a_point_it_loses_nothing_and_ends_bit_equal(lab: Lab, whole: Whole, point: str) -> None:
    child = lab.start(point=point)
    assert child.wait() == -9, child.said()
    check(lab, whole)
    again = lab.start(point=point.partition("@")[0])  # and once more where it goes on
    assert again.wait() in (-9, 0), again.said()
    check(lab, whole)
    lab.finish()
    whole.check_ended(lab.run)


def check(lab: Lab, whole: Whole) -> None:
    """What a kill left behind is whole, and says no more than is true."""
    runs = [path for path in (lab.place / "runs").glob("*") if not path.name.startswith(".")]
    if runs:
        assert runs == [lab.run]
        directory = RunDirectory(lab.run)
        status = directory.status()
        assert directory.liveness() in ("queued", "lost", "finished")
        whole.check_saved(lab.run, at_least=status.get("checkpoint") or 0)


@pytest.mark.parametrize("point", ["rows-copied", "rows-copied@2", "rows-dropped", "rows-dropped@2"])
def test_killed_as_it_takes_back_rows(lab: Lab, whole: Whole, point: str) -> None:
    child = lab.start(point="evaluation-appended@2")  # step 6: there are rows beyond the last save, and answers
    assert child.wait() == -9
    with (lab.run / "samples.jsonl").open("a") as file:
        file.write('{"step": 6, "prompt": "row 1", "policy": "", "reference": null}\n')
    steps = whole.check_saved(lab.run)
    with (lab.run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 0.0}\n')
    child = lab.start(point=point)
    assert child.wait() == -9, child.said()
    assert whole.check_saved(lab.run) == steps
    lab.finish()
    whole.check_ended(lab.run)


def test_killed_as_a_damaged_step_is_replaced(killed: Lab, whole: Whole) -> None:
    manifest = killed.checkpoints / "00000009" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    child = killed.start(point="commit-replaced")
    assert child.wait() == -9, child.said()
    assert whole.check_saved(killed.run) == 6
    killed.finish()
    whole.check_ended(killed.run)


def test_kills_at_random_instants_of_saves(tmp_path: Path, nursery: Nursery) -> None:
    """Forty, most of them in a save or where a step is retired; `soak.py` does many more."""
    seen = soak(tmp_path / "soak", nursery, kills=40, seed=20)
    assert seen.kills == 40
    assert seen.runs >= 2
    assert seen.fresh < 35  # they came further
    assert sum(count for where, count in seen.where.items() if "step" in where) >= 3, seen.where


@pytest.fixture(scope="module")
def policy(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run from whose weights those that sample begin."""
    lab = make(tmp_path_factory.mktemp("policy"), nursery, POLICY)
    lab.finish()
    return lab.run


@pytest.mark.parametrize("environment", ["counter", "asks again"], ids=["tools", "environment"])
def test_kills_while_episodes_are_sampled_and_learned_from(
    tmp_path: Path, nursery: Nursery, policy: Path, environment: str
) -> None:
    """Six each: episodes of several turns, dynamic sampling, two updates for each rollout."""
    seen = soak(tmp_path / "soak", nursery, kills=6, seed=21, recipe=online_recipe(policy, environment))
    assert seen.kills == 6
    assert seen.runs >= 1
    assert seen.fresh < 6  # they came further
    steps = [row for row in rows(Lab(tmp_path / "soak" / "whole", nursery).directory) if "loss" in row]
    assert max(row["environment/mean_turns"] for row in steps) > 1.5
    assert any(row.get("tools/call_frequency", 0) > 0.5 for row in steps) == (environment == "counter")


def test_each_point_is_killed_at() -> None:
    assert {re.sub("@.*", "", index) for index in KILLS} | set(ELSEWHERE) == set(POINTS)
