"""Every recipe in experiments/ as reviewable text: what it asks for, and where its arrays live.

`NNXDSL_UPDATE_GOLDENS=1 python -m pytest tests/test_recipes.py` writes the texts anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nnxdsl import Experiment, evolve, flatten
from nnxdsl.cli.load import load
from nnxdsl.config.core.codegen import render
from nnxdsl.program.blueprint import build_blueprint

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
RECIPES = sorted(path for path in (ROOT / "experiments").glob("*.py") if path.name != "make_data.py")


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> tuple[str, Experiment]:
    return request.param.stem, load(str(request.param), Path("runs"))


def check(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("NNXDSL_UPDATE_GOLDENS"):
        path.write_text(text)
    assert path.read_text() == text, f"{name} has changed; if that is meant, write the goldens anew"


def test_what_it_asks_for(recipe: tuple[str, Experiment]) -> None:
    name, experiment = recipe
    lines = [f"{path} = {render(value)}" for path, value in flatten(experiment).items()]
    check(f"{name}.txt", "\n".join([f"id = {experiment.id}", *lines]) + "\n")


def test_where_its_arrays_live(recipe: tuple[str, Experiment]) -> None:
    name, experiment = recipe
    on_eight = evolve(experiment, {"mesh.fsdp": 4, "mesh.tensor": 2})
    check(f"{name}.layout.txt", build_blueprint(on_eight).layout.dump())


def test_its_data_is_there(recipe: tuple[str, Experiment]) -> None:
    _, experiment = recipe
    sources = [experiment.data.path]
    if experiment.evaluation is not None and experiment.evaluation.data is not None:
        sources.append(experiment.evaluation.data.path)
    assert all((ROOT / path).is_file() for path in sources)


def test_no_golden_without_a_recipe() -> None:
    assert {path.name.split(".")[0] for path in GOLDEN.iterdir()} == {path.stem for path in RECIPES}
