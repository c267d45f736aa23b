"""Every tracker with its real client, offline or on this machine: what it holds after a stop and a resume.

TensorBoard's runs with the default suite; the others need `pip install 'nnxdsl[tracking]'` and `pytest -m slow`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from line_files.written import Written, end

from nnxdsl import Tracking

LOSSES = {step: 1 / (step + 1) for step in range(10) if step != 2}
"""Losses of all steps but the one that is NaN."""
EVALUATIONS = [(0, 0.0), (4, 2.0), (8, 4.0)]
MINUTES = 180
"""Seconds within which a client takes the last rows: MLflow makes the tables of its database."""


def twice(written: Written, tracking: Tracking) -> None:
    """A run that is stopped after step 5, and trains steps 3 to 5 again when it is resumed."""
    process = written.begin(tracking)
    written.train(range(6), evaluate=(0, 4))
    assert end(process, "stopped", MINUTES) == []
    process = written.begin(tracking, start=3)
    written.train(range(3, 10), evaluate=(4, 8))
    assert end(process, "finished", MINUTES) == []


def check(losses: list[tuple[int, float]], evaluations: list[tuple[int, float]], speeds: list[float]) -> None:
    """Compares what a tracker holds with what was written: steps once, in order, of the first attempt with them."""
    assert [step for step, _ in losses] == list(range(10))
    assert math.isnan(losses[2][1])
    assert {step: loss for step, loss in losses if step != 2} == pytest.approx(LOSSES, rel=1e-6)
    assert evaluations == EVALUATIONS
    assert speeds == [1] * 6 + [2] * 4


def test_tensorboard(written: Written, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    twice(written, Tracking.TensorBoard(str(tmp_path / "events")))

    def read() -> Any:
        accumulator = reader.EventAccumulator(str(tmp_path / "events" / "written-00000000"))
        accumulator.Reload()
        return accumulator

    def scalars(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in read().Scalars(name)]

    check(scalars("loss"), scalars("eval/loss"), [value for _, value in scalars("steps/s")])
    (text,) = read().Tensors("experiment")
    assert "    name = 'written'\n" in text.tensor_proto.string_val[0].decode()

    # A run that begins again has a record of its own, and takes the place of the earlier one.
    again = Written.make(tmp_path / "restarted" / "written-00000000")
    process = again.begin(Tracking.TensorBoard(str(tmp_path / "events")))
    again.train(range(3))
    assert end(process, "finished") == []
    assert [step for step, _ in scalars("loss")] == [0, 1, 2]


@pytest.mark.slow
def test_wandb(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(written.directory.path))
    twice(written, Tracking.WandB("project", mode="offline"))
    first, second = (list(records(file)) for file in sorted(written.directory.path.rglob("*.wandb")))
    run, resumed = (next(record.run for record in file if kind(record) == "run") for file in (first, second))
    assert run.run_id == resumed.run_id
    assert run.run_id.startswith("written-00000000-")
    assert (run.display_name, run.project) == ("written-00000000", "project")
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert (config["name"], config["type"]) == ("written", "Experiment")
    rows = [row for file in (first, second) for row in history(file)]
    losses, evaluations, speeds = (
        [(step, row[name]) for step, row in rows if name in row] for name in ("loss", "eval/loss", "steps/s")
    )
    check(losses, evaluations, [value for _, value in speeds])
    assert [record.exit.exit_code for record in second if kind(record) == "exit"] == [0]


def kind(record: Any) -> str | None:
    """What a record of W&B is about."""
    return record.WhichOneof("record_type")


def history(file: list[Any]) -> Iterator[tuple[int, dict[str, float]]]:
    """Steps and metrics of a W&B file."""
    for record in file:
        if kind(record) == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield record.history.step.num, row


def records(file: Path) -> Iterator[Any]:
    """The records of a W&B file: after 7 bytes, LevelDB's log format (blocks of 32 KiB; checksum, length, type)."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, offset, parts = file.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        length, part = struct.unpack("<HB", data[offset + 4 : offset + 7])
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield proto.Record.FromString(parts)
            parts = b""


@pytest.mark.slow
def test_trackio(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the package is imported
    pytest.importorskip("trackio")
    twice(written, Tracking.Trackio("project"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    assert storage.get_runs("project") == ["written-00000000"]
    rows = storage.get_logs("project", "written-00000000")
    losses, evaluations, speeds = (
        [(row["step"], row[name]) for row in rows if name in row] for name in ("loss", "eval/loss", "steps/s")
    )
    check(losses, evaluations, [value for _, value in speeds])
    assert storage.get_run_config("project", "written-00000000")["name"] == "written"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the database's library
def test_mlflow(written: Written, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    twice(written, Tracking.MLflow(uri, experiment="lab"))
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("lab").experiment_id])
    assert (run.info.run_name, run.info.status) == ("written-00000000", "FINISHED")
    assert (run.data.params["name"], run.data.tags["nnxdsl.run"]) == ("written", "written-00000000")

    def metric(name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]

    check(metric("loss"), metric("eval/loss"), [value for _, value in metric("steps/s")])
