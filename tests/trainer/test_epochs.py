"""Runs of epochs: the number of steps, resumed or not; the shortest experiment, on rows of token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

import nnxdsl
from nnxdsl import Adapter, Checkpoint, Data, Evaluation, Experiment, Model, Objective, PlanError, Result, evolve
from nnxdsl.planning.plan import plan
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.terminal.display import Display
from nnxdsl.terminal.plan_view import facts
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.prepare import prepare
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer

ROWS, STEPS = 11, 6
"""Two epochs in batches of four."""


@attrs.define
class StopAt(Hook):
    """Stops before a step."""

    step: int

    def on_step_begin(self, trainer: Trainer) -> None:
        """Stops once."""
        if trainer.step == self.step:
            trainer.stop()


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    """Text for two epochs."""
    rows = [json.dumps({"text": f"row {number} of text"}) for number in range(ROWS)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    return Experiment(
        name="epochs",
        model=Model.Gemma3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text(str(tmp_path / "text.jsonl"), max_length=24),
        batch_size=4,
        epochs=2,
        checkpoint=Checkpoint(every_steps=2),
    )


def learnt(directory: Path) -> list[tuple[Any, ...]]:
    """What the metrics say of each step, without its speed."""
    return [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) for row in Result(directory).metrics]


def test_five_lines_train_on_rows_of_ids_without_a_tokenizer(tmp_path: Path) -> None:
    row = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}
    rows = [json.dumps({**row, "prompt_ids": [1, number]}) for number in range(9)]
    (tmp_path / "ids.jsonl").write_text("\n".join(rows))
    directory = str(Path(__file__).parents[1] / "reference" / "llama3" / "untied")
    data = Data.Preferences(str(tmp_path / "ids.jsonl"), max_prompt_length=8, max_completion_length=8)
    short = Experiment(
        name="short", model=Model(directory), adapter=Adapter.LoRA(), objective=Objective.DPO(), data=data
    )
    result = short.run(tmp_path / "runs", quiet=True)
    assert (result.state, result.step) == ("finished", 2)
    assert [row["learning_rate"] for row in result.metrics] == pytest.approx([0.0, 1e-5])


@pytest.mark.slow
def test_a_run_of_epochs_is_that_of_its_steps_and_resumes(experiment: Experiment, tmp_path: Path) -> None:
    counted = evolve(experiment, {"steps": STEPS, "epochs": None})
    assert counted.id != experiment.id
    with Display(quiet=True) as display:
        of_steps = run(counted, tmp_path / "steps", display)
        stopped = run(experiment, tmp_path / "epochs", display, hooks=[StopAt(4)])
        assert (stopped.state, stopped.step) == ("stopped", 4)
        of_epochs = run(experiment, tmp_path / "epochs", display)
        assert (of_epochs.state, of_epochs.step, of_epochs.directory.name) == ("finished", STEPS, experiment.id)
        directory = RunDirectory(of_epochs.directory)
        assert directory.status().get("total") == STEPS
        assert directory.inconsistency() is None
        assert [attempt["experiment"]["epochs"] for attempt in directory.attempts()] == [2.0, 2.0]
        assert run(experiment, tmp_path / "epochs", display) == of_epochs
    assert learnt(of_epochs.directory) == learnt(of_steps.directory)
    assert Result(of_epochs.directory).load_model().generate(["row"], max_new_tokens=2)


@pytest.mark.slow
def test_held_out_rows_are_evaluated_and_never_trained_on(experiment: Experiment, tmp_path: Path) -> None:
    shared = evolve(experiment, {"test_size": 0.4, "epochs": 1})
    with Display(quiet=True) as display:
        prepared = prepare(shared, tmp_path / "runs", display)
        outcome = run(shared, tmp_path / "runs", display)
        assert run(shared, tmp_path / "runs", display) == outcome
    assert prepared.evaluator is not None
    assert prepared.evaluator.dataset is not None
    train, test = set(prepared.dataset.row_ids), set(prepared.evaluator.dataset.row_ids)
    assert (len(train | test), train & test) == (ROWS, set())
    assert outcome.step == -(-len(train) // 4)
    assert sorted(outcome.evaluations) == [0, outcome.step]
    used = {row for step in range(outcome.step) for row in prepared.batches().row_ids(step)}
    assert used == train
    held_out = tmp_path / "held_out.jsonl"
    rows = (tmp_path / "text.jsonl").read_text().splitlines()
    held_out.write_text(
        "\n".join(rows[int(name.rpartition(":")[2]) - 1] for name in prepared.evaluator.dataset.row_ids)
    )
    apart = evolve(
        experiment,
        {"steps": 1, "epochs": None, "evaluation": Evaluation(data=evolve(experiment.data, {"path": str(held_out)}))},
    )
    with Display(quiet=True) as display:
        expected = run(apart, tmp_path / "runs", display).evaluations[0]["eval/loss"]
    assert outcome.evaluations[0]["eval/loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.extended
def test_a_program_of_epochs_trains_once_it_knows_its_steps(experiment: Experiment) -> None:
    program = nnxdsl.compile(experiment)
    with pytest.raises(PlanError, match="epochs: steps of 2 epochs are unknown before rows are counted"):
        program.lower()
    with pytest.raises(PlanError, match="epochs: steps of 2 epochs are unknown before rows are counted"):
        _ = program.blueprint.total_steps
    assert nnxdsl.compile(experiment, steps=STEPS).blueprint.total_steps == STEPS


@pytest.mark.extended
def test_a_plan_of_epochs_reads_no_rows(experiment: Experiment) -> None:
    actual = plan(experiment)
    assert (actual["steps"], actual["epochs"], actual["rows"], actual["tokens_at_most"]) == (None, 2.0, None, None)
    assert facts(actual)[0] == ("epochs", "2, in steps of 4 rows in 1 micro-batch")
    of_steps = plan(evolve(experiment, {"steps": STEPS, "epochs": None}))
    assert actual["bytes_per_device"] == of_steps["bytes_per_device"]
