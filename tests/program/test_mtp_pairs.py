"""Multi-token prediction beside losses of completions: equal to torch's, in every arrangement of the batch."""

from __future__ import annotations

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
    Quantization,
    Reference,
    SpecError,
    Weights,
    compile,
    evolve,
    losses,
)
from nnxdsl.config.core.base import members
from nnxdsl.config.objectives.multi_token import WithMTP
from nnxdsl.data import Pairs
from nnxdsl.data.batch import PackedPairs, PairBatch
from nnxdsl.data.packing import Size, fit
from nnxdsl.losses.base import PairLogps
from nnxdsl.program.batches import kind_of
from nnxdsl.program.compile import Program
from nnxdsl.program.gradients.accumulation import mean_grads
from tests.program.test_packing import kept, ragged

FIGURES = Path(__file__).parent.parent / "reference" / "mtp" / "deepseek_v3"
MODEL = Model.HF(str(FIGURES), weights=Weights.HF(str(FIGURES)), mtp_layers=1)
WEIGHT = 0.3
OBJECTIVES = {
    "dpo": Objective.DPO(beta=0.1, mtp_loss_weight=WEIGHT),
    "orpo": Objective.ORPO(beta=0.1, mtp_loss_weight=WEIGHT),
    "kto": Objective.KTO(beta=0.1, mtp_loss_weight=WEIGHT),
}
LEAVES = {
    "mtp.token_norm.scale": "enorm.weight",
    "mtp.state_norm.scale": "hnorm.weight",
    "mtp.join.kernel": "eh_proj.weight",
    "mtp.norm.scale": "shared_head.norm.weight",
    "norm.scale": "model.norm.weight",
    "lead.blocks.0.mlp.down.kernel": "model.layers.0.mlp.down_proj.weight",
}
DOWN = "lead.blocks.0.mlp.down.kernel"
TOLERANCE = 1e-5
"""Of losses, of the gradient's length, and of the largest number of each gradient."""


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(FIGURES / "pairs.npz"))


def padded(expected: dict[str, np.ndarray], name: str) -> PairBatch:
    fields = {key: expected[key] for key in PairBatch._fields if key in expected and key not in ("weight", "desirable")}
    weight = np.ones(len(fields["prompt"]), np.float32)
    return PairBatch(**fields, weight=weight, desirable=expected["desirable"] if name == "kto" else None)


def packed(batch: PairBatch) -> PackedPairs:
    """The pairs of a batch in one block of two rows."""
    count, width = len(batch.prompt), batch.prompt.shape[1]
    sides = {
        "prompt": [row[width - length :] for row, length in zip(batch.prompt, batch.prompt_length, strict=True)],
        "chosen": [row[:length] for row, length in zip(batch.chosen, batch.chosen_length, strict=True)],
        "rejected": [row[:length] for row, length in zip(batch.rejected, batch.rejected_length, strict=True)],
    }
    data = Pairs(kept({name: ragged([row.tolist() for row in rows]) for name, rows in sides.items()}, count))
    size, rows = Size(blocks=1, rows=2, length=24, targets=32, items=6), np.arange(count)
    tokens, targets = data.packing_lengths()
    layout = fit(tokens[rows], targets[rows], size)
    assert layout is not None
    result = data.packed(rows, size, layout)
    # Where each pair went: its lengths tell.
    lengths = np.stack([batch.prompt_length, batch.chosen_length, batch.rejected_length], axis=1).tolist()
    mine = np.stack([result.prompt_length[0], result.chosen_length[0], result.rejected_length[0]], axis=1).tolist()
    index = [lengths.index(row) if row in lengths else 0 for row in mine]

    def moved(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else np.where(result.weight > 0, values[index][None], 0).astype(np.float32)

    fields = {"reference_chosen", "reference_rejected", "desirable"}
    return result._replace(**{name: moved(getattr(batch, name)) for name in fields})


def grads_of(program: Program, batch: Any) -> Any:
    state = program.init()
    learnt = jax.jit(
        partial(mean_grads, program.policy_loss, program.experiment.microbatches),
        static_argnames="uses_gradcache",
    )
    arrays = state.trainable, state.frozen, state.reference, program.shard_batch(batch), None
    return jax.device_get(learnt(*arrays, uses_gradcache=program.experiment.compares_parts))


def compare(expected: dict[str, np.ndarray], name: str, result: Any) -> None:
    """Loss, metric and gradients are those of torch."""
    gradients, terms = result
    loss, mtp_loss = expected[f"{name}.loss"], expected[f"{name}.mtp_loss"]
    assert terms.loss.total / terms.loss.count == pytest.approx(loss + WEIGHT * mtp_loss, rel=TOLERANCE)
    assert terms.metrics["mtp_loss"].total / terms.metrics["mtp_loss"].count == pytest.approx(mtp_loss, rel=TOLERANCE)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in gradients.values()))
    assert norm == pytest.approx(float(expected[f"{name}.norm"]), rel=TOLERANCE)
    for path, theirs in LEAVES.items():
        wanted = expected[f"{name}.to.{theirs}"].T
        np.testing.assert_allclose(gradients[path], wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max(), err_msg=path)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kto", "orpo"))])
def test_losses_and_gradients_are_those_of_rows_that_share_nothing(
    experiment: Callable[..., Experiment], expected: dict[str, np.ndarray], name: str
) -> None:
    batch = padded(expected, name)
    whole = experiment(model=MODEL, objective=OBJECTIVES[name])
    # Micro-batches have other numbers of targets; in KTO they go through GradCache.
    compare(expected, name, grads_of(compile(evolve(whole, {"microbatch_size": 2})), batch))
    compare(expected, name, grads_of(compile(whole), packed(batch)))


@pytest.mark.extended
def test_beside_an_adapter_the_layer_is_trained_whole(
    experiment: Callable[..., Experiment], expected: dict[str, np.ndarray]
) -> None:
    adapter = Adapter.LoRA(rank=2, alpha=6.0)
    program = compile(experiment(model=MODEL, objective=OBJECTIVES["dpo"], adapter=adapter, microbatch_size=2))
    gradients, terms = grads_of(program, padded(expected, "dpo"))
    loss, mtp_loss = expected["dpo.loss"], expected["dpo.mtp_loss"]
    assert terms.loss.total / terms.loss.count == pytest.approx(loss + WEIGHT * mtp_loss, rel=TOLERANCE)
    for path, theirs in LEAVES.items():
        wanted = expected[f"dpo.to.{theirs}"].T
        if path.startswith("mtp."):
            atol = TOLERANCE * np.abs(wanted).max()
            np.testing.assert_allclose(gradients[path], wanted, rtol=0, atol=atol, err_msg=path)
    # A new B is zero, so that its gradient is that of the weight, seen through A.
    a, wanted = program.init().trainable[DOWN + "_lora_a"], expected[f"dpo.to.{LEAVES[DOWN]}"].T
    wanted = 3.0 * np.asarray(a).T @ wanted
    atol = TOLERANCE * np.abs(wanted).max()
    np.testing.assert_allclose(gradients[DOWN + "_lora_b"], wanted, rtol=0, atol=atol)
    assert {path for path in gradients if "_lora_" not in path} == {
        path for path in program.blueprint.base if path.startswith("mtp.")
    }


@pytest.mark.extended
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"adapter": Adapter.LoRA(rank=2)}, id="adapter"),
        pytest.param({}, id="whole", marks=pytest.mark.slow),
        pytest.param(
            {"reference": Reference.Checkpoint(Weights.HF(str(FIGURES)))}, id="checkpoint", marks=pytest.mark.slow
        ),
    ],
)
def test_the_reference_is_as_it_was(
    experiment: Callable[..., Experiment], expected: dict[str, np.ndarray], fields: dict[str, Any]
) -> None:
    batch = kind_of(whole := padded(expected, "dpo")).without_cached(whole)
    actual = []
    for weight in (0.0, WEIGHT):
        objective = Objective.DPO(beta=0.1, mtp_loss_weight=weight)
        program = compile(experiment(model=MODEL, objective=objective, **fields))
        state = program.init()
        state, metrics = program.step(state, batch)
        assert float(metrics["rewards/margins"]) == 0.0  # before the step: equal to the bit
        reference = program.reference(state)
        assert reference is not None
        actual.append({path: np.asarray(leaf) for path, leaf in reference[1].items() if not path.startswith("mtp.")})
    assert actual[0].keys() == actual[1].keys()
    assert all(np.array_equal(actual[0][path], actual[1][path]) for path in actual[0])


def test_targets_are_the_tokens_of_chosen_completions_with_two_before_them(expected: dict[str, np.ndarray]) -> None:
    batch = padded(expected, "kto")._replace(weight=np.array([1, 1, 0, 1], np.float32))
    wanted = np.zeros((4, 6), bool)
    wanted[0, :4] = wanted[3, :6] = True  # the second is not desirable, the third fills up the batch
    assert np.array_equal(kind_of(batch).mtp_mask(batch), wanted)
    pairs = batch._replace(desirable=None)
    wanted[1, 1:3] = True  # its prompt has one token, so the first has only that before it
    assert np.array_equal(kind_of(pairs).mtp_mask(pairs), wanted)


def test_every_objective_counts_what_the_scale_is_made_of() -> None:
    """The divisor of the loss is the sum of the weights of rows: else the weight of MTP would be another."""
    terms = {"terms": (Objective.DPO(), Objective.ChosenSFT()), "weights": (1.0, 1.0)}
    draw = np.random.default_rng(0)
    policy, reference = (
        PairLogps(*draw.normal(-9, 2, (2, 4)), *np.full((2, 4), 5.0), np.ones(4), np.ones(4)) for _ in "ab"
    )
    weight = np.array([1, 0, 1, 1], np.float32)
    seen = 0
    for kind in members(Objective).values():
        if issubclass(kind, WithMTP) and kind.batch_kind in ("pairs", "feedback"):
            objective = kind(**terms if kind is Objective.Sum else {}, mtp_loss_weight=WEIGHT)
            ours = reference if objective.needs_reference else None
            policy, ours = jax.tree.map(jax.numpy.asarray, (policy, ours))
            assert float(losses.build(objective)(policy, ours, jax.numpy.asarray(weight)).loss.count) == 3.0, kind
            seen += 1
    assert seen == 20


def test_what_cannot_have_it_says_so(experiment: Callable[..., Experiment]) -> None:
    tiny = Model.DeepSeekV3("tiny", mtp_layers=1)
    with pytest.raises(SpecError, match=r"objective.mtp_loss_weight: has no effect: .* set model.mtp_layers=1"):
        experiment(model=Model.DeepSeekV3("tiny"), objective=OBJECTIVES["dpo"])
    with pytest.raises(SpecError, match=r"objective.mtp_loss_weight: .* trained whole, without Quantization.QAT"):
        experiment(model=tiny, objective=OBJECTIVES["dpo"], quantization=Quantization.QAT())
    with pytest.raises(SpecError, match=r"terms.0.mtp_loss_weight: .* set mtp_loss_weight of the sum"):
        Objective.Sum(terms=(OBJECTIVES["dpo"],), weights=(1.0,))
    with pytest.raises(SpecError, match=r"GRPO has no field 'mtp_loss_weight'"):
        evolve(
            experiment(model=tiny, objective=Objective.DPO()),
            {"objective": Objective.GRPO(rewards=(), mtp_loss_weight=0.3), "data": Data.Prompts("none.jsonl")},
        )


@pytest.mark.slow
def test_a_quantized_base_leaves_the_layer_in_float(
    experiment: Callable[..., Experiment], expected: dict[str, np.ndarray]
) -> None:
    asked = {"adapter": Adapter.LoRA(rank=2), "quantization": Quantization.Int8(block_size=4)}
    program = compile(experiment(model=MODEL, objective=OBJECTIVES["dpo"], **asked))
    before = program.init()
    first = {path: np.asarray(leaf) for path, leaf in before.trainable.items() if path.startswith("mtp.")}
    state, metrics = program.step(before, padded(expected, "dpo"))
    assert float(metrics["mtp_loss"]) == pytest.approx(float(expected["dpo.mtp_loss"]), rel=0.05)
    assert all(not np.array_equal(leaf, state.trainable[path]) for path, leaf in first.items() if "kernel" in path)
