"""Classes and functions that stand beside the user's file are found by every process that a command starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nnxdsl.runs.run_list import list_runs
from tests.fixtures.recipes import environment

BESIDE = '''
"""An objective, data, an optimizer, a tracker and a reward."""

import attrs

from nnxdsl import Data, Objective, Optimizer, Tracking
from nnxdsl.tracking import TrackedRun, Tracker, open_tracker


@attrs.frozen(kw_only=True)
class MyObjective(Objective.SFT):
    """An objective."""


@attrs.frozen(kw_only=True)
class MyData(Data.Text):
    """Texts."""


@attrs.frozen(kw_only=True)
class MyOptimizer(Optimizer.SGD):
    """An optimizer."""


@attrs.frozen(kw_only=True)
class MyTracking(Tracking):
    """Where metrics go: a line for each row, in a file beside this one."""


@open_tracker.register(MyTracking)
class MyTracker(Tracker):
    def __init__(self, settings: MyTracking, run: TrackedRun) -> None:
        self.path = f"{__file__}.{run.id}.txt"

    def log(self, step, metrics):
        with open(self.path, "a") as file:
            file.write(f"{step}\\n")


def my_reward(completion: str) -> float:
    return float(len(completion))
'''
RECIPE = """
import mine_beside as mine

from nnxdsl import *

experiment = Experiment(
    name="own",
    model=Model.Gemma3("tiny"),
    objective=mine.MyObjective(loss_on="all"),
    data=mine.MyData(__file__.replace("own.py", "texts.jsonl"), max_length=16),
    optimizer=mine.MyOptimizer(schedule=Schedule.Constant(lr=0.1)),
    batch_size=2,
    steps=2,
    tracking=(mine.MyTracking(),),
)
online = evolve(
    experiment,
    {
        "objective": Objective.GRPO(rewards=(Reward("mine_beside:my_reward"),), num_generations=2, beta=0.0),
        "data": Data.Prompts(
            experiment.data.path, max_prompt_length=8, max_completion_length=8, columns={"text": "prompt"}
        ),
    },
)
sweep = Sweep(experiment, product({"seed": [1, 2]}))
"""
Command = Callable[..., str]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory of the user's files, which no process runs in and no path names."""
    place = tmp_path / "files"
    place.mkdir()
    (place / "mine_beside.py").write_text(BESIDE)
    (place / "own.py").write_text(RECIPE)
    (place / "online.py").write_text("from own import online as experiment\n")
    (place / "texts.jsonl").write_text('{"text": "one two three"}\n{"text": "four five"}\n')
    return place


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """`python -P -m nnxdsl WORDS` in another directory; returns its output."""

    def run(*argv: str) -> str:
        command = [sys.executable, "-P", "-m", "nnxdsl", *argv]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in (done.stdout + done.stderr).lower()
        return done.stdout + done.stderr

    return run


@pytest.mark.extended
@pytest.mark.parametrize(
    ("argv", "count"),
    [
        (("run", "files/own.py"), 1),
        (("launch", "files/online.py"), 1),
        (("sweep", "files/own.py"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_run_and_its_tracker_find_them(place: Path, command: Command, argv: tuple[str, ...], count: int) -> None:
    command(*argv)
    runs = list_runs(place.parent / "runs")
    assert [(run.state, run.step) for run in runs] == [("finished", 2)] * count
    for run in runs:
        assert (place / f"mine_beside.py.{run.id}.txt").read_text().split() == ["0", "1"]
