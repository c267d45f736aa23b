"""A run of a tiny model, and the server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import nnxdsl
from nnxdsl import Data, Experiment, Model, Objective, Optimizer, Schedule
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from tests.fixtures.serving import serving


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run."""
    place = tmp_path_factory.mktemp("served")
    (place / "texts.jsonl").write_text('{"text": "a word and another word, and one more"}\n' * 4)
    experiment = Experiment(
        name="served",
        model=Model.Qwen3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text(str(place / "texts.jsonl"), max_length=48),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=3e-3)),
        batch_size=4,
        steps=4,
    )
    return run(experiment, place / "runs", Display(quiet=True)).directory


@pytest.fixture(scope="session")
def model(trained: Path) -> Pretrained:
    """The model, without a server."""
    return nnxdsl.load(trained)


@pytest.fixture(scope="session")
def server(trained: Path) -> Iterator[str]:
    """The address of a server in a process of its own."""
    with serving(trained.name, "--home", str(trained.parent), "--name", "tiny") as url:
        yield url
