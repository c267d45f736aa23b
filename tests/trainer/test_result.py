"""The result of a run in Python: metrics, samples, frames, the trained model; `experiment.run()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nnxdsl
from nnxdsl import Checkpoint, Data, Experiment, Model, Objective, Optimizer, RunError, Schedule

QUESTION = [{"role": "user", "content": "Hi 1"}]


def test_the_result_of_a_finished_run(finished: Any) -> None:
    result = nnxdsl.Result(finished.run("sft"))
    assert (result.state, result.step) == ("finished", len(result.metrics))
    assert result.checkpoints[-1] == result.step
    assert result.metrics[0]["loss"] > result.metrics[-1]["loss"]
    assert [row["step"] for row in result.evaluations][-1] == result.step
    assert {row["prompt"] for row in result.samples} == {"Hi 1"}
    assert repr(result) == f"Result({str(result.directory)!r}, state='finished', step={result.step})"
    page = result._repr_html_()
    assert f"<th>step {result.step}</th>" in page
    assert "eval/loss" in page or "<td>loss</td>" in page
    with pytest.raises(RunError, match="kind: expected 'metrics', 'evaluations' or 'samples', got 'loss'"):
        result.frame("loss")


def test_frames(finished: Any) -> None:
    pytest.importorskip("pandas")
    result = nnxdsl.Result(finished.run("sft"))
    frame = result.frame()
    assert frame["loss"].tolist() == [row["loss"] for row in result.metrics]
    assert result.frame("evaluations")["step"].tolist() == [row["step"] for row in result.evaluations]


@pytest.mark.slow
def test_the_model_of_a_run_answers_as_the_run_did(finished: Any) -> None:
    result = nnxdsl.Result(finished.run("sft"))
    model = result.load_model()
    (last,) = (row for row in result.samples if row["step"] == result.step)
    assert model.generate([QUESTION], max_new_tokens=6) == [last["policy"]]
    assert result.generate([QUESTION], max_new_tokens=6) == [last["policy"]]
    assert [path.name for path in (result.directory / "exported").iterdir()] == [str(result.step)]


@pytest.mark.slow
def test_an_experiment_runs_and_resumes_in_this_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "one two three"}\n{"text": "four five"}\n')
    experiment = Experiment(
        name="here",
        model=Model.Gemma3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text(str(tmp_path / "text.jsonl"), max_length=32),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
        batch_size=2,
        steps=3,
        checkpoint=Checkpoint(every_steps=2),
    )
    result = experiment.run(tmp_path / "runs", quiet=True)
    assert (result.state, result.step, len(result.metrics)) == ("finished", 3, 3)
    assert result.directory == tmp_path / "runs" / experiment.id
    assert capfd.readouterr().err == ""
    assert experiment.run(tmp_path / "runs") == result
    assert "already finished" in capfd.readouterr().err
