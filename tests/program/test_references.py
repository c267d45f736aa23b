"""References that follow the policy, and objectives of a difference that need none; what goes with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Divergence, Experiment, Memory, Objective, Reference, SpecError, compile
from nnxdsl.data.batch import PairBatch
from nnxdsl.program import losses
from nnxdsl.program.compiler import State
from nnxdsl.program.losses import Pairs
from nnxdsl.program.plan import plan
from nnxdsl.spec.base import members

WAYS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"adapter": Adapter.LoRA(rank=2, alpha=4.0)}}
SMALL = {"model": Small(layers=1, pattern=1)}
OF_DIFFERENCE = ("DPO", "RobustDPO", "IPO", "Hinge", "LengthNormalizedDPO", "EXO", "DiscoPOP")


@pytest.mark.parametrize("way", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_it_follows_every_so_many_steps(
    way: str,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., State],
) -> None:
    program = compile(experiment(**SMALL, **WAYS[way], reference=Reference.Synced(every_steps=2, mixup=0.3)))
    state, batch = trained(program), pairs(4)
    first = jax.device_get(state.trainable)
    assert state.reference.keys() == state.trainable.keys()
    assert program.targets().keys() == {"trainable", "optimizer", "reference"}
    expected = first
    for step in range(1, 6):
        state, metrics = program.step(state, batch)
        if step == 1:
            assert float(metrics["rewards/margins"]) == 0.0  # to the bit: it begins as the policy
        if step % 2 == 0:
            now = jax.device_get(state.trainable)
            expected = {path: np.float32(0.3) * now[path] + np.float32(0.7) * leaf for path, leaf in expected.items()}
        for path, leaf in expected.items():
            np.testing.assert_allclose(state.reference[path], leaf, rtol=1e-6, atol=1e-9, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_it_says_what_its_weights_say_and_is_saved(
    way: str,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., State],
) -> None:
    program = compile(experiment(**SMALL, **WAYS[way], reference=Reference.Synced(every_steps=2, mixup=0.3)))
    state, batch = trained(program), pairs(4)
    for _ in range(5):
        state, _ = program.step(state, batch)
    # What it says is what a model of these weights says.
    said = program.score(state._replace(trainable=dict(state.reference)), batch).scored
    own = program.score(state, batch).scored
    assert isinstance(said, Pairs)
    terms = losses.build(program.experiment.objective)(own, said, batch.weight)
    assert float(program.evaluate(state, batch)["loss"].total) == pytest.approx(float(terms.loss.total), rel=1e-5)

    # A checkpoint has it, and what goes on from one is what went on without.
    saved = jax.device_get(program.saved(state))
    assert saved.keys() == program.targets().keys()
    again = program.restored(trained(program), 5, saved)
    one, other = (program.step(s, batch) for s in (state, again))
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_where_it_takes_all_of_the_policy_it_is_the_policy(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., State]
) -> None:
    program = compile(experiment(**SMALL, **WAYS["lora"], reference=Reference.Synced(every_steps=1, mixup=1.0)))
    state, batch = trained(program), pairs(4)
    for _ in range(2):
        state, metrics = program.step(state, batch)
        assert float(metrics["rewards/margins"]) == 0.0
        assert float(metrics["loss"]) == pytest.approx(np.log(2), abs=1e-7)
    for path, leaf in state.reference.items():
        np.testing.assert_array_equal(leaf, state.trainable[path])


@pytest.mark.parametrize("name", OF_DIFFERENCE)
def test_without_a_model_log_ratios_are_log_probabilities(name: str) -> None:
    draw = np.random.default_rng(0)
    tokens = np.float32([3, 5, 8, 2]), np.float32([4, 4, 1, 9])
    policy = Pairs(*(np.float32(-draw.uniform(1, 9, 4)) for _ in range(2)), *tokens)
    nothing = Pairs(*(np.zeros(4, np.float32) for _ in range(2)), *tokens)
    loss = losses.build(members(Objective)[name]())
    for one, other in zip(
        jax.tree.leaves(loss(policy, None, np.ones(4))), jax.tree.leaves(loss(policy, nothing, np.ones(4))), strict=True
    ):
        assert float(one) == float(other)


def test_which_losses_are_of_a_difference() -> None:
    found = {name for name, cls in members(Objective).items() if cls is not Objective.Sum and cls.of_difference}
    assert found == set(OF_DIFFERENCE)


def test_a_program_without_a_model_has_none(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(**SMALL, objective=Objective.DPO(), reference=Reference.Uniform(), memory=Memory())
    assert asked.reference_mode == "none"
    assert compile(asked).computation.reference is None


def test_plans_say_which_and_why(experiment: Callable[..., Experiment]) -> None:
    def said(**fields: Any) -> str:
        return plan(experiment(**SMALL, **fields), "cpu", None)["reference"]

    synced = Reference.Synced(every_steps=1000, mixup=0.5)
    assert said(reference=synced, **WAYS["lora"]) == (
        "online: a float32 copy of the adapter that takes 0.5 of the policy after every 1,000 steps; part of the state "
        "and of its checkpoints"
    )
    assert "a float32 copy of the weights" in said(reference=synced)
    assert "all answers count as equally likely" in said(reference=Reference.Uniform(), memory=Memory())


def refused(build: Callable[[], object]) -> str:
    with pytest.raises(SpecError) as caught:
        build()
    return str(caught.value)


def test_what_does_not_go_together(experiment: Callable[..., Experiment]) -> None:
    synced, uniform, auto = Reference.Synced(), Reference.Uniform(), Memory()
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"objective": Objective.SimPO(), "reference": synced},
            "reference: Reference.Synced has no effect: Objective.SimPO has no reference",
        ),
        (
            {"objective": Objective.NCA(), "reference": uniform, "memory": auto},
            "reference: Objective.NCA reads more than a difference of log-ratios, which is all that Reference.Uniform "
            "gives; use another one",
        ),
        (
            {"objective": Objective.DPO(divergence=Divergence.ForwardKL()), "reference": uniform, "memory": auto},
            "reference: Divergence.ForwardKL makes scores of log-ratios, and Reference.Uniform gives none; use "
            "Divergence.ReverseKL()",
        ),
        (
            {"reference": synced, "memory": Memory(reference="cached")},
            "memory.reference: what Reference.Synced says changes, so it cannot be kept; use 'online'",
        ),
        (
            {"reference": uniform, "memory": Memory(reference="online")},
            "memory.reference: 'online' has no effect: Reference.Uniform is no model",
        ),
    ]
    for fields, message in cases:
        assert message in refused(lambda fields=fields: experiment(**fields))
    assert "mixup: expected a value > 0 and <= 1, got 0.0" in refused(lambda: Reference.Synced(mixup=0.0))


def test_runs_from_before_keep_their_ids(experiment: Callable[..., Experiment]) -> None:
    before = experiment(**SMALL)
    assert before.id == experiment(**SMALL, reference=Reference.Initial()).id
    assert before.id != experiment(**SMALL, reference=Reference.Synced()).id
