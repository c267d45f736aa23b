"""A run of a tiny model, and the server of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nnxdsl
from nnxdsl import Data, Experiment, Model, Objective, Optimizer, Schedule
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run


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
    words = [trained.name, "--home", str(trained.parent), "--port", "0", "--name", "tiny"]
    command = [sys.executable, "-m", "nnxdsl", "serve", *words]
    environment = {**os.environ, "NNXDSL_API_KEY": "a key"}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **piped, env=environment) as process:
        assert process.stdout is not None
        lines = list[str]()
        for line in process.stdout:
            lines.append(line)
            if "is served at " in line:
                break
        try:
            assert process.poll() is None, "".join(lines)
            yield lines[-1].split()[-1]
        finally:
            process.terminate()
        assert process.wait() in (-signal.SIGTERM, 0)
