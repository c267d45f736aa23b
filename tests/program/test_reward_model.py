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
from nnxdsl.data import load
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.tokenizers.base import BytesTokenizer
from nnxdsl.errors import DataError, PlanError, SpecError
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
MARGINS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of one row after another, as of `make_reward_model.py`."""


def training(weights: Weights = STORED, **fields: Any) -> Experiment:
    """An experiment as TRL ran it."""
    options = {
        "name": "reward",
        "model": Small(weights=weights, tokenizer=Tokenizer.Bytes(allow_mismatch=True)),
        "objective": OBJECTIVES["plain"],
        "data": PAIRS,
        "optimizer": ADAMW,
        "batch_size": FIGURES["batch"],
        "steps": len(FIGURES["runs"]["plain"]["steps"]),
        "precision": Precision(compute="float32"),
    }
    return Experiment(**{**options, **fields})


def steps_of(directory: Path) -> list[dict[str, float]]:
    """The figures of a run's steps."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_step_equals_that_of_trl(name: str, tmp_path: Path) -> None:
    outcome = run(training(objective=OBJECTIVES[name]), tmp_path, Display(quiet=True))
    expected = FIGURES["runs"][name]
    for actual, figures in zip(steps_of(outcome.directory), expected["steps"], strict=True):
        for key, value in figures.items():
            # TRL is in float32 as well; gradients of a step go through those before.
            assert actual[key] == pytest.approx(value, rel=1e-4, abs=2e-6), (actual["step"], key)


def with_margins(place: Path) -> Data:
    """The rows with margins."""
    rows = [{**json.loads(line), "by": MARGINS[n % 5]} for n, line in enumerate(ROWS.read_text().splitlines())]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return attrs.evolve(PAIRS, path=str(place / "pairs.jsonl"), margin="by")


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    "fields", [{"batching": Batching.Packed(length=64)}, {}, {"microbatch_size": 2, "steps": 3}], ids=str
)
def test_each_step_with_margins_equals_that_of_trl(fields: dict[str, Any], tmp_path: Path) -> None:
    asked = training(data=with_margins(tmp_path), **fields)
    steps = steps_of(run(asked, tmp_path, Display(quiet=True)).directory)
    for actual, figures in zip(steps, FIGURES["runs"]["margin"]["steps"], strict="steps" not in fields):
        for key, value in figures.items():
            assert actual[key] == pytest.approx(value, rel=1e-4, abs=2e-6), (actual["step"], key)
    plain = FIGURES["runs"]["plain"]["steps"][0]["loss"]
    assert steps[0]["loss"] > 1.1 * plain


def test_margins_are_read_by_reward_models_alone(tmp_path: Path) -> None:
    data = with_margins(tmp_path)
    with pytest.raises(
        SpecError, match=r"data.margin: has no effect with Objective.DPO; leave it out, or use Objective"
    ):
        training(data=data, objective=Objective.DPO())
    # Of a mixture, rows of a source without margins have a margin of 0.
    mixed = Data.Mixture(sources=((data, 1.0), (PAIRS, 1.0)))
    loaded = load(mixed, BytesTokenizer())
    assert isinstance(loaded, Pairs)
    margins = {str(loaded.row_ids[row]): loaded.batch([row], 1).margin[0] for row in range(len(loaded))}
    assert sorted(margins.values()) == sorted([*(MARGINS[n % 5] for n in range(26)), *[0.0] * 26])
    picked = loaded.select(np.array([3, 1]))
    assert isinstance(picked, Pairs)
    np.testing.assert_array_equal(picked.batch([0, 1], 3).margin[:2], loaded.batch([3, 1], 2).margin)


@pytest.mark.parametrize("value", ['"much"', "true", "[1]"])
def test_a_margin_is_a_finite_number(value: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{{"prompt": "a", "chosen": "b", "rejected": "c", "by": {value}}}\n')
    with pytest.raises(DataError, match="field 'by': expected a finite number, got "):
        load(attrs.evolve(PAIRS, path=str(path), margin="by"), BytesTokenizer())
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(DataError, match=r"field 'by' is missing; .*; data.margin names the column of margins"):
        load(attrs.evolve(PAIRS, path=str(path), margin="by"), BytesTokenizer())


@pytest.mark.extended
@pytest.mark.parametrize("fields", [{"batching": Batching.Packed(length=64)}, {"microbatch_size": 2}], ids=str)
def test_packed_pairs_and_micro_batches_have_the_same_first_step(fields: dict[str, Any], tmp_path: Path) -> None:
    figures = []
    for asked in (training(steps=1, optimizer=ADAMW), training(steps=1, **fields)):
        (actual,) = steps_of(run(asked, tmp_path, Display(quiet=True)).directory)
        figures.append({key: actual[key] for key in FIGURES["runs"]["plain"]["steps"][0]})
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)


@pytest.mark.extended
def test_rewards_of_a_stored_model_equal_those_of_transformers() -> None:
    actual = nnxdsl.load(STORED.path)
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for row, expected in zip(rows, FIGURES["rewards"], strict=True):
        got = [
            float(actual(np.array([row["prompt_ids"] + row[side]]))[0, -1, 0])
            for side in ("chosen_ids", "rejected_ids")
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
