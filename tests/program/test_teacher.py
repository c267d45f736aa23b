"""A teacher in the step: it is asked of the same tokens, gets no gradient, and lies where the layout says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Data,
    Distance,
    Experiment,
    Mesh,
    Model,
    Objective,
    Optimizer,
    PlanError,
    Quantization,
    Schedule,
    SpecError,
    compile,
)
from nnxdsl.data.batch import SequenceBatch
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.decoder import Decoder
from nnxdsl.planning.flops import work
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.compile import Program, TrainState

STUDENT, TEACHER = Small(layers=1, pattern=1), Small(layers=2, pattern=1, embed_dim=24, heads=4)


def objective(**fields: Any) -> Any:
    return Objective.Distill(**{"teacher": TEACHER, "loss_on": "all", **fields})


def logits(program: Program, state: TrainState, batch: SequenceBatch, *, teacher: bool) -> np.ndarray:
    if teacher:
        assert program.blueprint.teacher is not None
        template, leaves = program.blueprint.teacher.template, state.reference
    else:
        template, leaves = program.policy(state)

    @jax.jit
    def of(leaves: dict[str, jax.Array]) -> jax.Array:
        model = template.merge(leaves)
        assert isinstance(model, Decoder)
        out = model(
            jnp.asarray(batch.tokens), positions_right_padded(batch.length, batch.tokens.shape[1]), dtype=jnp.float32
        )
        return model.logits(out.hidden[:, :-1])

    return np.asarray(of(dict(leaves)), np.float64)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, Adapter.LoRA(rank=2)])
def test_hidden_states_are_compared(
    adapter: Any, experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch]
) -> None:
    """The loss is that without features and so many times their distance; so are the gradients."""
    near = attrs.evolve(TEACHER, embed_dim=16)
    batch = sequences(4)
    batch = batch._replace(weight=np.array([1, 1, 0, 1], np.float32))
    plain, asked = (
        compile(experiment(objective=objective(teacher=near, feature_weight=weight), model=STUDENT, adapter=adapter))
        for weight in (0.0, 0.5)
    )
    state = plain.init()
    mask = batch.loss_mask[:, 1:] & (batch.weight > 0)[:, None]
    taught = plain.blueprint.teacher
    assert taught is not None

    def states(template: Any, leaves: Any) -> jax.Array:
        places = positions_right_padded(batch.length, batch.tokens.shape[1])
        return template.merge(leaves)(jnp.asarray(batch.tokens), places, dtype=jnp.float32).hidden[:, :-1]

    template, leaves = plain.policy(state)
    theirs = np.asarray(states(taught.template, dict(state.reference)), np.float64)

    def cosine(trainable: Any) -> Any:
        ours = states(template, {**leaves, **trainable})
        product = jnp.sum(ours * theirs, -1) / jnp.linalg.norm(ours, axis=-1) / np.linalg.norm(theirs, axis=-1)
        return jnp.sum(jnp.where(mask, 1 - product, 0.0))

    value, toward = jax.value_and_grad(cosine)(dict(state.trainable))
    (actual, terms), (others, before) = (
        jax.jit(program.policy_loss.grads)(state.trainable, state.frozen, state.reference, program.shard_batch(batch))
        for program in (asked, plain)
    )
    features = terms.metrics["feature_distance"]
    assert float(features.count) == mask.sum()
    assert float(features.total) == pytest.approx(float(value), rel=2e-6)
    assert float(terms.loss.total) == pytest.approx(float(before.loss.total + value / 2), rel=2e-6)
    for path, gradient in actual.items():
        expected = others[path] + toward[path] / 2
        np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max(), err_msg=path)


@pytest.mark.slow
def test_a_step_is_that_of_whole_logits(
    experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch]
) -> None:
    asked = objective(temperature=2.0, hard_weight=0.25)
    program = compile(experiment(objective=asked, model=STUDENT, microbatch_size=2))
    state, batch = program.init(), sequences(4)
    assert set(program.layout.arrays) == {"trainable", "teacher", "optimizer"}
    assert state.reference.keys() == program.layout.arrays["teacher"].keys()
    student, teacher = (logits(program, state, batch, teacher=which) for which in (False, True))
    mask = batch.loss_mask[:, 1:]
    p, q = log_softmax(teacher / 2), log_softmax(student / 2)
    apart = (np.exp(p) * (p - q)).sum(-1)
    nll = -np.take_along_axis(log_softmax(student), batch.tokens[:, 1:, None], axis=-1)[..., 0]
    expected = 0.75 * 4 * apart[mask].mean() + 0.25 * nll[mask].mean()
    before = jax.device_get(state.reference)
    moved, metrics = program.step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=2e-6)
    assert float(metrics["distill_loss"]) == pytest.approx(apart[mask].mean(), rel=2e-6)
    assert float(metrics["nll_loss"]) == pytest.approx(nll[mask].mean(), rel=2e-6)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved.reference), before)
    assert float(program.step(moved, batch)[1]["loss"]) < expected


def test_what_does_not_fit_is_told(experiment: Callable[..., Experiment]) -> None:
    other = attrs.evolve(TEACHER, vocab_size=50)
    with pytest.raises(PlanError, match=r"objective.teacher: teacher and student vocabularies differ: .* 50, .* 48"):
        build_blueprint(experiment(objective=objective(teacher=other), model=STUDENT))
    with pytest.raises(PlanError, match=r"objective.feature_weight: the teacher.s embed_dim is 24, the student.s 16"):
        build_blueprint(experiment(objective=objective(feature_weight=0.5), model=STUDENT))
    with pytest.raises(SpecError, match=r"data: Objective.Distill reads conversations or texts"):
        experiment(objective=objective(), data=Data.Preferences("none.jsonl"))
    with pytest.raises(SpecError, match=r"hard_weight: expected a value >= 0 and < 1, got 1\.0"):
        objective(hard_weight=1.0)
    with pytest.raises(SpecError, match=r"loss_on: .*assistant.* has no meaning for Data.Text"):
        experiment(objective=Objective.Distill(teacher=TEACHER))


def test_a_teacher_takes_a_forward_pass(
    experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch]
) -> None:
    batch = sequences(4)
    alone = work(build_blueprint(experiment(objective=Objective.SFT(loss_on="all"), model=STUDENT)), batch)
    taught = work(build_blueprint(experiment(objective=objective(), model=STUDENT)), batch)
    learning = work(build_blueprint(experiment(objective=Objective.SFT(loss_on="all"), model=TEACHER)), batch)
    assert taught.model_flops - alone.model_flops == pytest.approx(learning.model_flops / 3)
    assert taught.executed > alone.executed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Distance.ForwardKL(), Distance.ReverseKL(), Distance.JSD(beta=0.3)], ids=str)
@pytest.mark.parametrize("quantization", [None, Quantization.NF4(block_size=8)])
def test_adapters_learn_from_a_teacher(
    kind: Any,
    quantization: Any,
    experiment: Callable[..., Experiment],
    sequences: Callable[..., SequenceBatch],
) -> None:
    fields = {"model": STUDENT, "adapter": Adapter.LoRA(rank=4), "quantization": quantization, "microbatch_size": 2}
    program = compile(experiment(objective=objective(distance=kind), **fields))
    state, batch = program.init(), sequences(4)
    frozen = jax.device_get(state.frozen)
    held = program.evaluate(state, batch)
    state, metrics = program.step(state, batch)
    first = float(metrics["distill_loss"])
    assert float(held["distill_loss"].total / held["distill_loss"].count) == pytest.approx(first, rel=2e-6)
    for _ in range(20):
        state, metrics = program.step(state, batch)
    assert float(metrics["distill_loss"]) < first
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), frozen)


def test_a_teacher_of_another_family_is_planned() -> None:
    from_gemma = Objective.Distill(teacher=Model.Gemma3("tiny"))
    asked = Experiment(
        name="taught",
        model=Model.Qwen3("tiny"),
        objective=from_gemma,
        data=Data.Conversations("none.jsonl"),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=8,
        steps=1,
        mesh=Mesh(fsdp=4, tensor=2),
    )
    blueprint = build_blueprint(asked)
    layout = blueprint.layout
    assert blueprint.teacher is not None
    assert layout.arrays["teacher"].keys() == blueprint.teacher.base.keys() != blueprint.base.keys()
    assert all(placed.dtype == "float32" for placed in layout.arrays["teacher"].values())
    assert any(placed.used_axes for placed in layout.arrays["teacher"].values())
