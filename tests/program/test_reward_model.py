"""Reward models against TRL's trainer and transformers; tests/reference/make_reward_model.py makes the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from small_lab.model import Small

import nnxdsl
from nnxdsl import (
    Adapter,
    Batching,
    Data,
    Evaluation,
    Experiment,
    Model,
    Objective,
    Order,
    Precision,
    Tokenizer,
    Weights,
)
from nnxdsl.errors import PlanError
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export
from tests.fixtures.trl import adamw

REFERENCE = Path(__file__).parents[1] / "reference"
FIGURES: dict[str, Any] = json.loads((REFERENCE / "reward_model" / "figures.json").read_text())
ROWS = REFERENCE / "replay" / "pairs.jsonl"
STORED = Weights.HF(str(REFERENCE / "reward_model" / "model"))
PAIRS = Data.Preferences(str(ROWS), max_prompt_length=16, max_completion_length=16, order=Order.AsInFile())
ADAMW = adamw(FIGURES["settings"])
OBJECTIVES = {"plain": Objective.Reward(), "centred": Objective.Reward(center_rewards_coefficient=0.1)}


def training(weights: Weights = STORED, **fields: Any) -> Experiment:
    """An experiment as TRL ran it."""
    given = {
        "name": "reward",
        "model": Small(weights=weights, tokenizer=Tokenizer.Bytes(allow_mismatch=True)),
        "objective": OBJECTIVES["plain"],
        "data": PAIRS,
        "optimizer": ADAMW,
        "batch_size": FIGURES["batch"],
        "steps": len(FIGURES["runs"]["plain"]["steps"]),
        "precision": Precision(compute="float32"),
    }
    return Experiment(**{**given, **fields})


def steps_of(directory: Path) -> list[dict[str, float]]:
    """The figures of a run's steps."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_step_equals_that_of_trl(name: str, tmp_path: Path) -> None:
    outcome = run(training(objective=OBJECTIVES[name]), tmp_path, Display(quiet=True))
    expected = FIGURES["runs"][name]
    for found, figures in zip(steps_of(outcome.directory), expected["steps"], strict=True):
        for key, value in figures.items():
            # TRL is in float32 as well; gradients of a step go through those before.
            assert found[key] == pytest.approx(value, rel=1e-4, abs=2e-6), (found["step"], key)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("fields", [{"batching": Batching.Packed(length=64)}, {"microbatch_size": 2}], ids=str)
def test_packed_pairs_and_micro_batches_have_the_same_first_step(fields: dict[str, Any], tmp_path: Path) -> None:
    figures = []
    for asked in (training(steps=1, optimizer=ADAMW), training(steps=1, **fields)):
        (found,) = steps_of(run(asked, tmp_path, Display(quiet=True)).directory)
        figures.append({key: found[key] for key in FIGURES["runs"]["plain"]["steps"][0]})
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)


@pytest.mark.extended
def test_rewards_of_a_stored_model_equal_those_of_transformers() -> None:
    found = nnxdsl.load(STORED.path)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for row, expected in zip(rows, FIGURES["rewards"], strict=True):
        got = [
            float(found(np.array([row["prompt_ids"] + row[side]]))[0, -1, 0]) for side in ("chosen_ids", "rejected_ids")
        ]
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.extended
@pytest.mark.default_variants(1)
@pytest.mark.parametrize("adapter", [None, Adapter.LoRA(rank=2)], ids=["full", "lora"])
def test_an_export_is_read_back_and_trained_on(adapter: Adapter | None, tmp_path: Path) -> None:
    """The export compares rewards itself; what is trained on it begins with the head that was trained."""
    outcome = run(training(adapter=adapter), tmp_path / "runs", Display(quiet=True))
    exported = export(outcome.directory, tmp_path / "model")
    fields = json.loads((exported.directory / "config.json").read_text())
    assert fields["architectures"] == ["Gemma3TextForSequenceClassification"]
    assert fields["id2label"] == {"0": "LABEL_0"}
    again = run(training(Weights.HF(str(exported.directory)), steps=1), tmp_path / "runs", Display(quiet=True))
    (first,) = steps_of(again.directory)
    assert first["loss"] < steps_of(outcome.directory)[0]["loss"]
    if adapter is not None:
        place = export(outcome.directory, tmp_path / "adapter", adapter=True).directory
        settings = json.loads((place / "adapter_config.json").read_text())
        assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])


@pytest.mark.extended
def test_the_objective_decides_the_head(tmp_path: Path) -> None:
    """A tied head is in every directory; one of its own is missing in that of a reward model."""
    text = Data.Text(str(REFERENCE / "replay" / "texts.jsonl"), max_length=64)
    sft = training(objective=Objective.SFT(loss_on="all"), data=text, steps=1)
    assert "score.kernel" not in build_blueprint(sft).base
    assert run(sft, tmp_path, Display(quiet=True)).state == "finished"
    llama = Model.Llama3("tiny", tokenizer=Tokenizer.Bytes(allow_mismatch=True))
    untied = run(training(model=llama, steps=1), tmp_path, Display(quiet=True))
    place = export(untied.directory, tmp_path / "llama").directory
    assert json.loads((place / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    with pytest.raises(PlanError, match=r"lm_head\.kernel.*for sequence classification, which has no output head"):
        run(
            training(model=attrs.evolve(llama, weights=Weights.HF(str(place))), objective=sft.objective, data=text),
            tmp_path,
            Display(quiet=True),
        )


def test_a_reward_model_samples_nothing() -> None:
    with pytest.raises(PlanError, match=r"prompts: Objective.Reward has no output head over the vocabulary"):
        build_blueprint(training(evaluation=Evaluation(every_steps=5, prompts=("Why?",), max_new_tokens=4)))
