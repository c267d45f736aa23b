"""References that follow the policy, and objectives of a difference that need none; what goes with what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Checkpoint,
    Data,
    Divergence,
    Experiment,
    Memory,
    Objective,
    Optimizer,
    Reference,
    RunError,
    Schedule,
    SpecError,
    Tokenizer,
    Weights,
    compile,
    losses,
)
from nnxdsl.config.core.base import members
from nnxdsl.data.batch import PairBatch
from nnxdsl.losses.base import PairLogps
from nnxdsl.planning.plan import plan
from nnxdsl.program import init, precomputed
from nnxdsl.program.batches import kind_of
from nnxdsl.program.checkpoint_views import checkpoint_arrays, checkpoint_targets, with_restored
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run

WAYS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"adapter": Adapter.LoRA(rank=2, alpha=4.0)}}
SMALL = {"model": Small(layers=1, pattern=1)}
OF_DIFFERENCE = ("DPO", "RobustDPO", "IPO", "Hinge", "LengthNormalizedDPO", "EXO", "DiscoPOP")


class Trained:
    """A source of weights with values that a trained model might have."""

    def __init__(self, program: Program, seed: int) -> None:
        self.base, self.seed = program.blueprint.base, seed

    def leaf(self, path: str) -> np.ndarray:
        shape = self.base[path].shape
        draw = np.random.default_rng([self.seed, *path.encode()])
        spread = 0.3 if path.endswith("norm.scale") else 1.5 * shape[-1 if "embed" in path else -2] ** -0.5
        return (draw.standard_normal(shape) * spread).astype(np.float32)


@pytest.mark.extended
@pytest.mark.parametrize("way", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_it_follows_every_so_many_steps(
    way: str,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
) -> None:
    program = compile(
        experiment(**SMALL, **WAYS[way], reference=Reference.Synced(every_steps=2, ref_model_mixup_alpha=0.3))
    )
    state, batch = trained(program), pairs(4)
    first = jax.device_get(state.trainable)
    assert state.reference.keys() == state.trainable.keys()
    assert checkpoint_targets(program).keys() == {"trainable", "optimizer", "reference"}
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
    trained: Callable[..., TrainState],
) -> None:
    program = compile(
        experiment(**SMALL, **WAYS[way], reference=Reference.Synced(every_steps=2, ref_model_mixup_alpha=0.3))
    )
    state, batch = trained(program), pairs(4)
    for _ in range(5):
        state, _ = program.step(state, batch)
    # What it says is what a model of these weights says.
    said = program.score(state._replace(trainable=dict(state.reference)), batch).loss_inputs
    value = program.score(state, batch).loss_inputs
    assert isinstance(said, PairLogps)
    terms = losses.build(program.experiment.objective)(value, said, batch.weight)
    assert float(program.evaluate(state, batch)["loss"].total) == pytest.approx(float(terms.loss.total), rel=1e-5)

    # A checkpoint has it, and what goes on from one is what went on without.
    saved = jax.device_get(checkpoint_arrays(program, state))
    assert saved.keys() == checkpoint_targets(program).keys()
    again = with_restored(program, trained(program), 5, saved)
    one, other = (program.step(s, batch) for s in (state, again))
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_where_it_takes_all_of_the_policy_it_is_the_policy(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    program = compile(
        experiment(**SMALL, **WAYS["lora"], reference=Reference.Synced(every_steps=1, ref_model_mixup_alpha=1.0))
    )
    state, batch = trained(program), pairs(4)
    for _ in range(2):
        state, metrics = program.step(state, batch)
        assert float(metrics["rewards/margins"]) == 0.0
        assert float(metrics["loss"]) == pytest.approx(np.log(2), abs=1e-7)
    for path, leaf in state.reference.items():
        np.testing.assert_array_equal(leaf, state.trainable[path])


OTHER = Reference.Checkpoint(Weights.HF("another"))


@pytest.mark.extended
@pytest.mark.parametrize("way", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_other_weights_are_asked_beside_the_policy(
    way: str,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
) -> None:
    asked = experiment(**SMALL, **WAYS[way], reference=OTHER)
    program = compile(asked)
    source = init.ReferenceSource(Trained(program, 0), Trained(program, 1))
    state, batch = program.init(source), pairs(4, fill=1)
    assert state.reference.keys() == program.blueprint.base.keys()
    # A policy with those weights says what the reference must say.
    base = {p: x for p, x in state.reference.items() if p in state.frozen or p in state.trainable}
    other = state._replace(
        frozen={p: base.get(p, x) for p, x in state.frozen.items()},
        trainable={p: base.get(p, x) for p, x in state.trainable.items()},
    )
    policy, reference = program.score(state, batch).loss_inputs, program.score(other, batch).loss_inputs
    assert isinstance(policy, PairLogps)
    expected = losses.build(asked.objective)(policy, reference, batch.weight)
    assert float(expected.loss.total / expected.loss.count) != pytest.approx(np.log(2), rel=1e-3)
    _, metrics = program.step(state, batch)
    for name, (total, count) in {"loss": expected.loss, **expected.metrics}.items():
        assert float(metrics[name]) == pytest.approx(float(total / count), rel=1e-5, abs=1e-6), name


@pytest.mark.slow
def test_other_weights_may_be_asked_once(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch]
) -> None:
    program = compile(experiment(**SMALL, **WAYS["lora"], reference=OTHER, memory=Memory(reference="cached")))
    assert "reference" not in program.layout.arrays
    source = init.ReferenceSource(Trained(program, 0), Trained(program, 1))
    state, apart, batch = program.init(source), precomputed.load_reference(program, source), pairs(4, fill=1)
    assert state.reference == {}
    asked = kind_of(batch).with_reference_logps(batch, precomputed.reference_outputs(program, apart, batch))
    always = compile(experiment(**SMALL, **WAYS["lora"], reference=OTHER))
    at_once, at_every_step = program.step(state, asked)[1], always.step(always.init(source), batch)[1]
    for name, value in at_every_step.items():
        assert float(at_once[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    with pytest.raises(ValueError, match="batch has no `reference_logps`"):
        program.step(program.init(source), batch)


@pytest.mark.parametrize("name", OF_DIFFERENCE)
def test_without_a_model_log_ratios_are_log_probabilities(name: str) -> None:
    draw = np.random.default_rng(0)
    tokens = np.float32([3, 5, 8, 2]), np.float32([4, 4, 1, 9])
    policy = PairLogps(*(np.float32(-draw.uniform(1, 9, 4)) for _ in range(2)), *tokens)
    nothing = PairLogps(*(np.zeros(4, np.float32) for _ in range(2)), *tokens)
    loss = losses.build(members(Objective)[name]())
    for one, other in zip(
        jax.tree.leaves(loss(policy, None, np.ones(4))), jax.tree.leaves(loss(policy, nothing, np.ones(4))), strict=True
    ):
        assert float(one) == float(other)


def test_which_losses_are_of_a_difference() -> None:
    actual = {name for name, cls in members(Objective).items() if cls is not Objective.Sum and cls.of_difference}
    assert actual == set(OF_DIFFERENCE)


def test_a_program_without_a_model_has_none(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(**SMALL, objective=Objective.DPO(), reference=Reference.Uniform(), memory=Memory())
    assert asked.reference_mode == "none"
    assert not compile(asked).blueprint.reference.exists


@pytest.mark.extended
def test_plans_say_which_and_why(experiment: Callable[..., Experiment]) -> None:
    def said(**fields: Any) -> str:
        return plan(experiment(**SMALL, **fields), "cpu", None)["reference"]

    synced = Reference.Synced(every_steps=1000, ref_model_mixup_alpha=0.5)
    assert said(reference=synced, **WAYS["lora"]) == (
        "online: a float32 copy of the adapter, synced every 1,000 steps (ref_model_mixup_alpha=0.5); part of the "
        "state and of its checkpoints"
    )
    assert "a float32 copy of the weights" in said(reference=synced)
    assert said(reference=OTHER) == "online: the weights of Weights.HF, run on every batch"
    once = said(reference=OTHER, memory=Memory(reference="cached"))
    assert once.startswith("cached: precomputed from the weights of Weights.HF before step 0; no reference weights")
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
            "reference: Objective.NCA reads more than differences of log-ratios, which are all that Reference.Uniform "
            "gives; use another one",
        ),
        (
            {"objective": Objective.DPO(divergence=Divergence.ForwardKL()), "reference": uniform, "memory": auto},
            "reference: Divergence.ForwardKL makes scores of log-ratios, and Reference.Uniform gives none; use "
            "Divergence.ReverseKL()",
        ),
        (
            {"reference": synced, "memory": Memory(reference="cached")},
            "memory.reference: Reference.Synced changes in training, so it cannot be cached; use 'online'",
        ),
        (
            {"reference": uniform, "memory": Memory(reference="online")},
            "memory.reference: 'online' has no effect: Reference.Uniform is no model",
        ),
    ]
    for fields, message in cases:
        assert message in refused(lambda fields=fields: experiment(**fields))
    assert "weights: Weights.Random gives no trained model" in refused(lambda: Reference.Checkpoint(Weights.Random()))
    assert "ref_model_mixup_alpha: expected a value > 0 and <= 1, got 0.0" in refused(
        lambda: Reference.Synced(ref_model_mixup_alpha=0.0)
    )


def test_runs_from_before_keep_their_ids(experiment: Callable[..., Experiment]) -> None:
    before = experiment(**SMALL)
    assert before.id == experiment(**SMALL, reference=Reference.Initial()).id
    assert before.id != experiment(**SMALL, reference=Reference.Synced()).id


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cached", "online"])
def test_a_run_that_finds_other_weights_of_its_reference_is_refused(mode: str, tmp_path: Path) -> None:
    replay = Path(__file__).parents[1] / "reference" / "replay"
    other = tmp_path / "other"
    shutil.copytree(replay / "model", other)
    file = other / "model.safetensors"
    bits = file.read_bytes()

    def write(changed: int) -> None:
        """The weights, the last so many of them as other numbers of about their size: of an exponent one lower."""
        numbers = np.frombuffer(bits[len(bits) - 4 * changed :], np.float32) / 2
        file.write_bytes(bits[: len(bits) - 4 * changed] + numbers.tobytes())

    write(2000)
    asked = Experiment(
        name="compared",
        model=Small(weights=Weights.HF(str(replay / "model")), tokenizer=Tokenizer.Bytes()),
        adapter=Adapter.LoRA(rank=2),
        objective=Objective.DPO(beta=0.3),
        reference=Reference.Checkpoint(Weights.HF(str(other))),
        data=Data.Preferences(str(replay / "pairs.jsonl"), max_prompt_length=16, max_completion_length=16),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.01)),
        batch_size=4,
        steps=2,
        memory=Memory(reference=mode),  # type: ignore[arg-type]
        checkpoint=Checkpoint(every_steps=1),
    )
    outcome = run(asked, tmp_path / "runs", Display(quiet=True))
    rows = [json.loads(line) for line in (outcome.directory / "metrics.jsonl").read_text().splitlines()]
    assert abs(rows[0]["loss"] - np.log(2)) > 0.01  # another model is another reference

    def undo() -> None:
        """The run as if it had been cut off after its first step."""
        shutil.rmtree(outcome.directory / "checkpoints" / "00000002")
        status = json.loads((outcome.directory / "status.json").read_text())
        (outcome.directory / "status.json").write_text(json.dumps({**status, "state": "stopped", "step": 1}))

    undo()
    write(1999)
    with pytest.raises(RunError, match="the frozen weights or the reference have changed"):
        run(asked, tmp_path / "runs", Display(quiet=True))
    write(2000)
    assert run(asked, tmp_path / "runs", Display(quiet=True)).state == "finished"
    again = [json.loads(line) for line in (outcome.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kto", "synced", "other", "modified"])
def test_eight_devices_say_what_one_says(name: str, on_eight_devices: Callable[..., Any]) -> None:
    actual = on_eight_devices("program/on_references.py", name)
    for one, eight in zip(actual["one"], actual["eight"], strict=True):
        for metric, value in one.items():
            assert eight[metric] == pytest.approx(value, rel=2e-5, abs=2e-6), metric
