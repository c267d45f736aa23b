"""Every tracker with its real client, offline or on this machine: what it holds after stops, kills and resumes.

TensorBoard's runs with the default suite; the others need `pip install 'nnxdsl[tracking]'` and `pytest -m slow`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from line_files import held
from line_files.written import Written, end, read_lines

from nnxdsl import Tracking
from tests.waiting import wait_until

LOSSES = {step: 1 / (step + 1) for step in range(10) if step != 2}
"""Losses of all steps but the one that is NaN."""
EVALUATIONS = [(0, 0.0), (4, 2.0), (8, 4.0)]
ROOT = Path(__file__).parents[2]


def twice(written: Written, tracking: Tracking) -> None:
    """A run that is stopped after step 5, and trains steps 3 to 5 again when it is resumed."""
    process = written.begin(tracking)
    written.train(range(6), evaluate=(0, 4))
    assert end(process, "stopped") == []
    process = written.begin(tracking, start=3)
    written.train(range(3, 10), evaluate=(4, 8))
    assert end(process, "finished") == []


def check(metric: held.Held) -> None:
    """Compares what a tracker holds with what was written: steps once, in order, of the first attempt with them."""
    losses = metric("loss")
    assert [step for step, _ in losses] == list(range(10))
    assert math.isnan(losses[2][1])
    assert {step: loss for step, loss in losses if step != 2} == pytest.approx(LOSSES, rel=1e-6)
    assert metric("eval/loss") == EVALUATIONS
    assert [value for _, value in metric("steps/s")] == [1] * 6 + [2] * 4


@pytest.mark.extended
def test_tensorboard(written: Written, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = tmp_path / "events" / "written-00000000"
    twice(written, Tracking.TensorBoard(str(directory.parent)))
    check(held.tensorboard(directory))
    events = reader.EventAccumulator(str(directory))
    events.Reload()
    (text,) = events.Tensors("experiment")
    assert "    name = 'written'\n" in text.tensor_proto.string_val[0].decode()

    # A run that begins again has a record of its own, and takes the place of the earlier one.
    again = Written.make(tmp_path / "restarted" / "written-00000000")
    process = again.begin(Tracking.TensorBoard(str(directory.parent)))
    again.train(range(3))
    assert end(process, "finished") == []
    assert [step for step, _ in held.tensorboard(directory)("loss")] == [0, 1, 2]


@pytest.mark.slow
def test_wandb(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(written.directory.path))
    twice(written, Tracking.WandB("project", mode="offline"))
    check(held.wandb(written.directory.path))
    first, second = (list(held.wandb_records(file)) for file in sorted(written.directory.path.rglob("*.wandb")))
    run, resumed = (next(record.run for record in file if kind(record) == "run") for file in (first, second))
    assert run.run_id == resumed.run_id
    assert run.run_id.startswith("written-00000000-")
    assert (run.display_name, run.project) == ("written-00000000", "project")
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert (config["name"], config["type"]) == ("written", "Experiment")
    assert [record.exit.exit_code for record in second if kind(record) == "exit"] == [0]


def kind(record: Any) -> str | None:
    """What a record of W&B is about."""
    return record.WhichOneof("record_type")


@pytest.mark.slow
def test_trackio(written: Written, trackio_directory: Path) -> None:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    twice(written, Tracking.Trackio("project"))
    assert storage.get_runs("project") == ["written-00000000"]
    check(held.trackio("project", "written-00000000"))
    assert storage.get_run_config("project", "written-00000000")["name"] == "written"


@pytest.fixture(scope="session")
def trackio_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the databases of Trackio, which reads the variable when it is imported."""
    directory = tmp_path_factory.mktemp("trackio")
    os.environ["TRACKIO_DIR"] = str(directory)
    return directory


@pytest.mark.slow
def test_what_trackio_cannot_write_is_a_warning(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "file" / "trackio"))
    process = written.begin(Tracking.Trackio("project"))
    written.train(range(3))
    (warning,) = end(process, "finished")
    assert warning.startswith("tracking.0: Trackio has stopped: RunError: trackio")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the database's library
def test_mlflow(written: Written, tmp_path: Path) -> None:
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    twice(written, Tracking.MLflow(f"sqlite:///{tmp_path / 'mlflow.db'}", experiment="lab"))
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    assert (run.info.run_name, run.info.status) == ("written-00000000", "FINISHED")
    assert (run.data.params["name"], run.data.tags["nnxdsl.run"]) == ("written", "written-00000000")
    check(held.mlflow(client, run.info.run_id))


TRAINED = """
from nnxdsl import *

experiment = Experiment(
    name="tracked",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(),
    data=Data.Conversations("{data}/quickstart.jsonl", max_length=64),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
    batch_size=4,
    steps=120,
    evaluation=Evaluation(
        every_steps=25, data=Data.Conversations("{data}/quickstart_held_out.jsonl", max_length=64)
    ),
    checkpoint=Checkpoint(every_steps=20),
    tracking=(
        Tracking.TensorBoard("events"),
        Tracking.WandB("project", mode="offline"),
        Tracking.Trackio("project"),
        Tracking.MLflow("sqlite:///mlflow.db"),
    ),
)

if __name__ == "__main__":
    experiment.main()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_killed_and_resumed_training_is_whole_in_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trackio_directory: Path
) -> None:
    for package in ("tensorboard", "wandb", "trackio", "mlflow"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINED.format(data=ROOT / "experiments" / "data"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "WANDB_CONFIG_DIR": str(tmp_path)}
    argv = [sys.executable, "train.py", "run", "--quiet"]
    first = subprocess.Popen(argv, env=environment)
    wait_until(lambda: any(len(read_lines(file)) > 70 for file in Path("runs").glob("*/metrics.jsonl")))
    first.send_signal(signal.SIGKILL)
    first.wait()
    subprocess.run(argv, env=environment, check=True)

    (directory,) = Path("runs").glob("tracked-*")
    rows = read_lines(directory / "metrics.jsonl")
    starts = [attempt["start"] for attempt in read_lines(directory / "attempts.jsonl")]
    assert len(starts) == 2
    assert starts[1] > 0
    client = importlib.import_module("mlflow").MlflowClient("sqlite:///mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("nnxdsl").experiment_id])
    for metric in (
        held.tensorboard(Path("events") / directory.name),
        held.wandb(directory),
        held.trackio("project", directory.name),
        held.mlflow(client, run.info.run_id),
    ):
        for name in ("loss", "eval/loss"):
            wanted = [(row["step"], row[name]) for row in rows if name in row]
            actual = metric(name)
            assert [step for step, _ in actual] == [step for step, _ in wanted]
            assert [value for _, value in actual] == pytest.approx([value for _, value in wanted], rel=1e-6)
    assert [row for row in read_lines(directory / "events.jsonl") if "warning" in str(row["event"])] == []
