"""Every objective with every way of training: what was tried is right and on the page, and some is tried again."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Objective
from nnxdsl.config.core.base import members

HERE = Path(__file__).parent


def module(name: str) -> Any:
    """A file of this directory that is a script as well."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


matrix = module("matrix")
STORED: dict[str, Any] = json.loads(matrix.STORE.read_text())


def test_all_was_tried_and_nothing_was_wrong() -> None:
    assert matrix.OBJECTIVES.keys() == members(Objective).keys()
    assert STORED.keys() == matrix.OBJECTIVES.keys()
    for name, row in STORED.items():
        assert list(row) == list(matrix.trainings(name))
        for training, said in row.items():
            assert "refused" in said or said.keys() > {*matrix.furthest(name)} - {"alone"}, (name, training)
            assert matrix.wrong(said) == [], (name, training)


def test_the_page_has_it() -> None:
    text = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.page(text, STORED) == text


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "training"),
    [
        ("KTO", "QLoRA-NF4"),
        ("DPO", "QLoRA-Int8"),
        ("DPO", "DoRA"),
        ("SFT", "full"),
        ("Distill", "full"),
        ("GRPO", "LoRA"),
    ],
)
def test_a_cell_on_one_device(objective: str, training: str) -> None:
    said = matrix.tried(objective, training, ("alone", "2 parts"))
    assert matrix.wrong(said) == []
    assert "2 parts" in said
    assert said["start"] == pytest.approx(STORED[objective][training]["start"], rel=2e-6)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_cell(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "matrix.py"), "--store", str(tmp_path / "matrix.json")]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    actual = json.loads((tmp_path / "matrix.json").read_text())
    for name in matrix.OBJECTIVES:
        assert list(actual[name]) == list(matrix.trainings(name))
        for said in actual[name].values():
            assert "refused" in said or said.keys() > {*matrix.furthest(name)} - {"alone"}, name
