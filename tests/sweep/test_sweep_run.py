"""`Sweep.run()` and `nnxdsl.list_runs()`: results in Python, as frames and HTML."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nnxdsl
from nnxdsl import Data, Experiment, Model, Objective, Optimizer, RunError, Schedule, Sweep, SweepResult, product
from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.runs.run_dir import RunDirectory
from tests.waiting import HANG_SECONDS, wait_until

FILE = """
from nnxdsl import *


experiment = Experiment(
    name="tiny",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(loss_on="all"),
    data=Data.Text("texts.jsonl", max_length=32),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=1e-2)),
    batch_size=2,
    steps=STEPS,
)
result = Sweep(experiment, product({"seed": [0, 1]})).run(quiet=True)
print(result)
"""


@pytest.fixture
def sweep() -> Sweep:
    base = Experiment(
        name="tiny",
        model=Model.Gemma3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text("none.jsonl", max_length=16),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=2,
        steps=2,
    )
    return Sweep(base, product({"seed": [0, 1, 2], "notes": ["<b>&"]}))


def ended(home: Path, one: Experiment, loss: float, state: str = "finished") -> None:
    run = RunDirectory.create(home / one.id, identity=canonical(one), experiment_json=to_dict(one), experiment_py="")
    run.append_metrics({"step": 1, "loss": loss, "grad_norm": 1.0})
    run.write_status(state=state, step=2, error="RunError: <i>bad</i>" if state == "failed" else None)
    run.close()


def test_a_sweep_that_has_run_is_its_result(sweep: Sweep, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for one, loss in zip(sweep, (0.5, 0.25), strict=False):
        ended(tmp_path, one, loss)
    ended(tmp_path, sweep.experiments[2], 0.1, "failed")  # not started again
    result = sweep.run(tmp_path, quiet=True)
    assert capfd.readouterr().err == ""
    assert isinstance(result, SweepResult)
    assert [row.point for row in result.rows] == [2, 1, 0]
    assert repr(result) == (
        f"SweepResult({str(result.directory)!r}, 2 of 3 finished, best='{sweep.experiments[2].id}', loss=0.1)"
    )
    assert result.best.directory == tmp_path / sweep.experiments[2].id
    assert [run.metrics[-1]["loss"] for run in result] == [0.1, 0.25, 0.5]
    page = result._repr_html_()
    assert "<th>seed</th>" in page
    assert "<td>0.25</td>" in page
    assert "data:image/svg+xml;base64," in page
    assert "<b>&" not in page
    assert json.loads((result.directory / "results.json").read_text())["best"] == sweep.experiments[2].id


def test_a_result_without_the_metric_has_no_best_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run has 'loss' yet"):
        _ = SweepResult(tmp_path / "sweeps" / "none", "loss", "minimize", ()).best


def test_frames_of_sweeps_and_runs(sweep: Sweep, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    assert nnxdsl.list_runs(tmp_path / "none").empty
    for one, loss in zip(sweep, (0.5, 0.25, 0.75), strict=True):
        ended(tmp_path, one, loss)
    frame = sweep.run(tmp_path, quiet=True).frame()
    assert frame.columns.tolist() == ["point", "run", "state", "step", "seed", "notes", "loss", "grad_norm"]
    assert frame["loss"].tolist() == [0.25, 0.5, 0.75]
    assert frame["seed"].tolist() == [1, 0, 2]
    runs = nnxdsl.list_runs(tmp_path)
    assert set(runs["id"]) == {one.id for one in sweep}
    assert runs["state"].tolist() == ["finished"] * 3
    assert "loss" not in runs
    assert set(nnxdsl.list_runs(str(tmp_path), metrics=True)["loss"]) == {0.25, 0.5, 0.75}
    with pytest.raises(RunError, match="is no directory"):
        nnxdsl.list_runs(tmp_path / sweep.experiments[0].id / "run.json")


def test_a_frame_without_pandas_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RunError, match=r"a frame needs pandas: pip install 'nnxdsl\[notebook\]'; or read "):
        nnxdsl.list_runs(tmp_path)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "texts.jsonl").write_text('{"text": "one two three"}\n{"text": "four five"}\n')
    return tmp_path / "sweep.py"


@pytest.mark.slow
def test_a_sweep_in_a_script_runs_its_points(script: Path) -> None:
    script.write_text(FILE.replace("STEPS", "2"))
    done = subprocess.run([sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, check=True)
    assert "2 of 2 finished, best='tiny-" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_an_interrupt_stops_the_points_with_everything_saved(script: Path) -> None:
    script.write_text(FILE.replace("STEPS", "100_000"))
    # A shell's background job ignores interrupts, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen([sys.executable, script.name], cwd=script.parent, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        wait_until(lambda: child.poll() is not None or list(script.parent.glob("runs/tiny-*/metrics.jsonl")))
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=HANG_SECONDS)
    finally:
        child.kill()
    assert child.returncode == 0
    assert out.startswith("SweepResult(")
    (run,) = script.parent.glob("runs/tiny-*")
    status = RunDirectory(run).status()
    assert status.get("state") == "stopped"
    assert status.get("checkpoint") == status.get("step") != 0
    assert not list(script.parent.glob("runs/sweeps/*/stop"))
