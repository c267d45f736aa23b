"""A teacher that is asked once: its words stand in the batch, steps do not hold it, and all words are the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Data, Distance, Experiment, Objective, PlanError, SpecError, compile
from nnxdsl.data.batch import SequenceBatch
from nnxdsl.planning.flops import work
from nnxdsl.planning.plan import plan
from nnxdsl.program import precomputed
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.memory import memory

STUDENT, TEACHER = Small(layers=1, pattern=1), Small(layers=2, pattern=1, embed_dim=24, heads=4)
VOCAB_SIZE = 48


def objective(**fields: Any) -> Any:
    return Objective.Distill(**{"teacher": TEACHER, "loss_on": "all", "top_k": 4, **fields})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        (Distance.ForwardKL(), None),
        (Distance.ReverseKL(), None),
        (Distance.JSD(beta=0.3), Adapter.LoRA(rank=2)),
    ],
    ids=str,
)
def test_with_all_words_a_step_is_that_of_a_teacher_in_it(
    kind: Any, adapter: Any, experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch]
) -> None:
    batch = sequences(4)._replace(weight=np.array([1, 1, 0, 1], np.float32))
    actual = []
    for top_k in (None, VOCAB_SIZE):
        asked = objective(distance=kind, temperature=2.0, hard_weight=0.25, top_k=top_k)
        program = compile(experiment(objective=asked, model=STUDENT, adapter=adapter, microbatch_size=2))
        state, inputs = program.init(), batch
        if top_k is not None:
            assert not state.reference
            assert "teacher" not in program.layout.arrays
            inputs = precomputed.with_teacher_top_k(program, precomputed.load_teacher(program), batch)
        gradients, terms = jax.jit(program.policy_loss.grads)(
            state.trainable, state.frozen, state.reference, program.shard_batch(inputs)
        )
        actual.append((gradients, terms, program.step(state, inputs)[1]))
    (theirs, before, online), (ours, after, once) = actual
    assert float(after.loss.total) == pytest.approx(float(before.loss.total), rel=1e-6)
    for name, value in online.items():
        assert float(once[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    for path, gradient in theirs.items():
        np.testing.assert_allclose(ours[path], gradient, rtol=1e-5, atol=1e-6 * np.abs(gradient).max(), err_msg=path)


def test_a_step_that_knows_nothing_of_the_teacher_is_refused(
    experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch]
) -> None:
    program = compile(experiment(objective=objective(), model=STUDENT))
    with pytest.raises(ValueError, match=r"precomputed\.with_teacher_top_k\(program, teacher, batch\)`.*, or leave"):
        program.step(program.init(), sequences(4))


def test_what_does_not_fit_is_told(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(SpecError, match=r"feature_weight: hidden states cannot be precomputed, and top_k"):
        objective(feature_weight=0.5)
    with pytest.raises(SpecError, match=r"top_k: expected a value > 0, got 0"):
        objective(top_k=0)
    with pytest.raises(PlanError, match=r"objective.top_k: top_k=49 exceeds the teacher's vocab_size 48"):
        build_blueprint(experiment(objective=objective(top_k=49), model=STUDENT))


@pytest.mark.extended
def test_a_plan_says_what_is_kept_and_counts_no_teacher_in_a_step(
    experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch]
) -> None:
    once, always, alone = (
        experiment(objective=asked, model=STUDENT, data=Data.Text("none.jsonl", max_length=32), steps=10)
        for asked in (objective(), objective(top_k=None), Objective.SFT(loss_on="all"))
    )
    said = plan(once)["reference"]
    # Ten steps of four rows of 31 targets, of each four ids and five log-probabilities.
    assert said.endswith(
        "(before step 0; then its weights are freed): 36 bytes for each target, at most 0.0 MiB for 40 rows"
    )
    parts = {part.name: part for part in memory(build_blueprint(once))}
    assert "teacher" in {part.name for part in memory(build_blueprint(always))}
    assert "teacher" not in parts
    assert parts["teacher top-k"].bytes == 4 * 32 * 36
    batch = sequences(4)
    assert work(build_blueprint(once), batch).model_flops == work(build_blueprint(alone), batch).model_flops
    assert work(build_blueprint(once), batch).executed < work(build_blueprint(always), batch).executed
    # One that is larger than all of a step is what a device must have room for.
    large = build_blueprint(experiment(objective=objective(teacher=Small(layers=40, mlp_dim=4096)), model=STUDENT))
    needed = sum(part.bytes for part in memory(large))
    assert needed == large.teacher_layout.device_bytes()["teacher"]
