"""Runs, sweeps and exports whose home, data, project and temporary directory have characters that mean something."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nnxdsl.runs.run_list import list_runs
from tests.fixtures.recipes import environment

PROJECT = """
from mine import texts

from nnxdsl import *

experiment = Experiment(
    name="tiny",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(loss_on="all"),
    data=Data.Text(texts, max_length=16),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
    batch_size=2,
    steps=2,
)
sweep = Sweep(experiment, product({"seed": [0, 1]}))
"""
ODD = "läufe 実行 😀 [v1] !~'\"$#%20&; \t|*?<>(){a,b}`@,=+"
Command = Callable[..., str]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """`python -m nnxdsl WORDS` in a directory, with a temporary directory; returns its output."""

    def run(place: Path, temporary: str, *argv: str, code: int = 0) -> str:
        (tmp_path / temporary).mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "nnxdsl", *argv],
            cwd=place,
            env={**environment(), "TMPDIR": str(tmp_path / temporary)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert os.listdir(tmp_path / temporary) == []
        return done.stdout + done.stderr

    return run


def write_project(place: Path, texts: str = "texts.jsonl") -> None:
    place.mkdir()
    (place / texts).write_text('{"text": "one two three"}\n{"text": "four five"}\n')
    (place / "mine.py").write_text(f"texts = {texts!r}\n")
    (place / "tiny.py").write_text(PROJECT)


@pytest.mark.slow
def test_a_sweep_and_an_export_of_its_best_run(tmp_path: Path, command: Command) -> None:
    place = tmp_path / ODD
    texts = "texts läufe ~'\"$#%20&;.jsonl"  # brackets, * and ? are globs of data
    write_project(place, texts)
    home = f"runs {ODD}"
    assert "finished" in command(place, "tmp", "sweep", "tiny.py", "--home", home)
    runs = list_runs(place / home)
    assert [(run.state, run.step) for run in runs] == [("finished", 2)] * 2
    first = f"{home}/{runs[0].id}"
    command(place, "tmp", "export", first, f"model {ODD}")
    assert (place / f"model {ODD}" / "config.json").is_file()
    assert "all the same" in command(place, "tmp", "compare", first, f"model {ODD}")
    assert "already finished" in command(place, "tmp", "run", "tiny.py", "--home", home, "seed=1")


@pytest.mark.slow
def test_a_temporary_directory_with_pattern_characters(tmp_path: Path, command: Command) -> None:
    write_project(tmp_path / "project")
    odd = "tmp [2]*?%{}~ 😀"
    command(tmp_path / "project", odd, "run", "tiny.py")
    (run,) = list_runs(tmp_path / "project" / "runs")
    assert (run.state, run.step) == ("finished", 2)
    command(tmp_path / "project", odd, "export", run.id, "model")
    # With an odd home as well there is no plain path to link it to: refused, and nothing of it is left.
    message = command(tmp_path / "project", odd, "run", "tiny.py", "--home", "runs [v1]", code=2)
    assert "set TMPDIR to another one, or name another directory" in message
    assert list_runs(tmp_path / "project" / "runs [v1]") == []
