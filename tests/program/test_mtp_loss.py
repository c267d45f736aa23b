"""Tokens predicted further ahead: the loss that is added in training, its targets, and what cannot have it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nnxdsl import (
    Adapter,
    Data,
    Experiment,
    Model,
    Objective,
    PlanError,
    Quantization,
    SpecError,
    Weights,
    compile,
    evolve,
)
from nnxdsl.config.core.run_id import canonical
from nnxdsl.data.batch import PackedSequences, SequenceBatch
from nnxdsl.program import init
from nnxdsl.program.batches import kind_of
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.gradients.accumulation import mean_grads

FIGURES = Path(__file__).parent.parent / "reference" / "mtp" / "deepseek_v3"
WEIGHTS = Weights.HF(str(FIGURES))
MODEL = Model.HF(str(FIGURES), weights=WEIGHTS, mtp_layers=1)
TINY = Model.DeepSeekV3("tiny", mtp_layers=1)
LEARNT = Objective.SFT(loss_on="all", mtp_loss_weight=0.3)
LEAVES = {
    "mtp.token_norm.scale": "enorm.weight",
    "mtp.state_norm.scale": "hnorm.weight",
    "mtp.join.kernel": "eh_proj.weight",
    "mtp.norm.scale": "shared_head.norm.weight",
    "norm.scale": "model.norm.weight",
}
TOLERANCE = 1e-5
"""Of losses, of the gradient's length, and of the largest number of each gradient."""


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(FIGURES / "expected.npz"))


@pytest.fixture(scope="module")
def batch(expected: dict[str, np.ndarray]) -> SequenceBatch:
    return rollout_batch(expected)


def rollout_batch(expected: dict[str, np.ndarray]) -> SequenceBatch:
    targets = expected["targets"].copy()
    targets[:, 0] = False  # nothing predicts a first token
    return SequenceBatch(expected["tokens"], expected["lengths"], targets, np.ones(len(targets), np.float32))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_loss_and_gradient_equal_those_of_the_reference_in_micro_batches(
    experiment: Callable[..., Experiment], name: str
) -> None:
    figures = FIGURES.with_name(name)
    expected = dict(np.load(figures / "expected.npz"))
    batch, model = rollout_batch(expected), Model.HF(str(figures), weights=Weights.HF(str(figures)), mtp_layers=1)
    program = compile(experiment(model=model, objective=LEARNT, microbatch_size=2))
    state = program.init()
    learnt = jax.jit(partial(mean_grads, program.policy_loss, program.experiment.microbatches))
    gradients, terms = jax.device_get(
        learnt(state.trainable, state.frozen, state.reference, program.shard_batch(batch), None)
    )
    loss, further = expected["loss"], expected["mtp_loss"]
    assert terms.loss.total / terms.loss.count == pytest.approx(loss + 0.3 * further, rel=TOLERANCE)
    assert terms.metrics["mtp_loss"].total / terms.metrics["mtp_loss"].count == pytest.approx(further, rel=TOLERANCE)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in gradients.values()))
    assert norm == pytest.approx(float(expected["norm"]), rel=TOLERANCE)
    for path, theirs in LEAVES.items():
        wanted = expected[f"to.{theirs}"].T
        np.testing.assert_allclose(gradients[path], wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max(), err_msg=path)


@pytest.mark.extended
def test_evaluations_have_it_beside_their_loss_and_without_it_all_is_as_it_was(
    experiment: Callable[..., Experiment], expected: dict[str, np.ndarray], batch: SequenceBatch
) -> None:
    plain = experiment(model=Model.HF(str(FIGURES), weights=WEIGHTS), objective=Objective.SFT(loss_on="all"))
    assert "mtp" not in canonical(plain).replace(str(FIGURES), "")
    for asked in (plain, experiment(model=MODEL, objective=LEARNT)):
        program = compile(asked)
        further = [path for path in program.blueprint.base if path.startswith("mtp.")]
        assert bool(further) == (asked is not plain)
        actual = program.evaluate(program.init(), batch)
        assert ("mtp_loss" in actual) == (asked is not plain)
        for name in {"loss", "mtp_loss"} & set(actual):
            value = float(actual[name].total / actual[name].count)
            assert value == pytest.approx(float(expected[name]), rel=TOLERANCE)


@pytest.mark.extended
def test_it_is_added_to_distillation(
    experiment: Callable[..., Experiment], expected: dict[str, np.ndarray], batch: SequenceBatch
) -> None:
    teacher = Model.HF(str(FIGURES), weights=WEIGHTS)
    objective = Objective.Distill(teacher=teacher, loss_on="all", mtp_loss_weight=0.3)
    program = compile(experiment(model=MODEL, objective=objective, microbatch_size=2))
    _, metrics = program.step(program.init(), batch)
    # The teacher is what the model begins as.
    assert float(metrics["loss"]) == pytest.approx(0.3 * float(expected["mtp_loss"]), rel=TOLERANCE)


def test_targets_are_those_whose_token_before_has_one_before_it_in_its_sequence() -> None:
    tokens = np.zeros((2, 5), np.int32)
    mask = np.array([[0, 1, 1, 1, 1], [0, 1, 0, 1, 0]], bool)
    padded = SequenceBatch(tokens, np.array([5, 4], np.int32), mask, np.ones(2, np.float32))
    assert kind_of(padded).target_mask(padded).tolist() == [[True, True, True, True], [True, False, True, False]]
    assert kind_of(padded).mtp_mask(padded).tolist() == [[False, True, True, True], [False, False, True, False]]
    # A block of two rows of five slots: sequences of three and two tokens, then one of four and padding.
    segment = np.array([[[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]], np.int32)
    source = np.array([[0, 1, 3, 5, 6, 7, 0]], np.int32)
    packed = PackedSequences(
        np.zeros((1, 2, 5), np.int32),
        np.zeros((1, 2, 5), np.int32),
        segment,
        source,
        np.zeros_like(source),
        np.array([[1, 1, 1, 1, 1, 1, 0]], bool),
        np.ones(1, np.float32),
    )
    assert kind_of(packed).mtp_mask(packed).tolist() == [[False, True, False, False, True, True, False]]


def test_what_cannot_have_it_says_so(experiment: Callable[..., Experiment]) -> None:
    def problem(**fields: Any) -> str:
        with pytest.raises(SpecError) as raised:
            experiment(**{"objective": LEARNT, "model": TINY, **fields})
        (actual,) = raised.value.problems
        return str(actual)

    assert problem(model=Model.DeepSeekV3("tiny")) == (
        "objective.mtp_loss_weight: has no effect: Model.DeepSeekV3 has no multi-token prediction (MTP) layer; "
        "set model.mtp_layers=1"
    )
    assert problem(model=Model.Gemma3("tiny")) == (
        "objective.mtp_loss_weight: has no effect: Model.Gemma3 has no multi-token prediction (MTP) layer; set 0"
    )
    assert problem(quantization=Quantization.QAT()) == (
        "objective.mtp_loss_weight: an MTP layer is trained whole, without Quantization.QAT; set 0, "
        "or quantization=None"
    )
    earlier = experiment(model=Model.DeepSeekV3("tiny"), objective=Objective.SFT(loss_on="all"))
    assert problem(model=Model.DeepSeekV3("tiny", mtp_layers=1, weights=Weights.From(earlier))) == (
        "model.mtp_layers: model.weights.experiment ends without that layer; set 1 there, or 0 here"
    )
    teacher = Objective.Distill(teacher=TINY, loss_on="all")
    with pytest.raises(SpecError, match=r"objective.teacher.mtp_layers: has no effect"):
        experiment(objective=teacher, model=Model.DeepSeekV3("tiny"), data=Data.Text("none.jsonl", max_length=32))
    with pytest.raises(SpecError, match=r"mtp_layers: expected a value >= 0 and <= 1, got 2"):
        Model.DeepSeekV3("tiny", mtp_layers=2)


def test_weights_without_the_layer_are_refused_by_its_arrays(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(FIGURES.parents[1] / "families" / "deepseek_v3", tmp_path / "plain"))
    asked = experiment(
        model=Model.HF(str(directory), weights=Weights.HF(str(directory)), mtp_layers=1), objective=LEARNT
    )
    with pytest.raises(PlanError) as raised:
        init.open_source(build_blueprint(asked))
    file = directory / "model.safetensors"
    missing = f"{file}: expected a tensor model.layers.5.eh_proj.weight of shape (24, 48), there is none"
    assert f"mtp.join.kernel: {missing}" in [str(problem) for problem in raised.value.problems]
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 0}))
    with pytest.raises(PlanError, match=r"model.mtp_layers: .* has no multi-token-prediction \(MTP\) layer; set 0"):
        build_blueprint(asked)


def test_a_layer_that_nothing_trains_goes_along(experiment: Callable[..., Experiment]) -> None:
    for fields in ({"objective": Objective.SFT(loss_on="all")}, {}, {"adapter": Adapter.LoRA(rank=2)}):
        blueprint = build_blueprint(experiment(model=TINY, **fields))
        layer = {path for path in blueprint.base if path.startswith("mtp.")}
        assert layer
        assert layer <= set(blueprint.frozen)


@pytest.mark.slow
def test_with_routers_in_parts_it_is_as_at_once(experiment: Callable[..., Experiment], batch: SequenceBatch) -> None:
    whole = experiment(model=evolve(MODEL, {"router_aux_loss_coef": 0.5}), objective=LEARNT)
    actual = []
    for size in (4, 2):
        program = compile(evolve(whole, {"microbatch_size": size}))
        state, metrics = program.step(program.init(), batch)
        actual.append((jax.device_get(state.trainable), {name: float(value) for name, value in metrics.items()}))
    (one, said), (other, also) = actual
    assert also == pytest.approx(said, rel=1e-5)
    for path, leaf in one.items():
        np.testing.assert_allclose(other[path], leaf, rtol=0, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_packed_rows_and_meshes_agree(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("program/on_mtp.py")
    wanted = report["one"]["metrics"]
    assert wanted["mtp_loss"] > 0
    for name, actual in report.items():
        assert actual["metrics"] == pytest.approx(wanted, rel=2e-6), name
        assert actual["away"] == pytest.approx(0, abs=1e-6), name
