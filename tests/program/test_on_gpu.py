"""Arrays in the host's memory, and weights and products of few bits, on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_lab import samples
from small_lab.model import Small

from nnxdsl import Adapter, Data, Experiment, Memory, Objective, Optimizer, Precision, Quantization, Schedule, compile
from nnxdsl.adapters import weight_only_quant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="runs on a GPU alone"),
]

STEPS = 3
LORA = Adapter.LoRA(rank=2, alpha=4.0)
MODEL = Small(layers=4, pattern=1, heads=4, embed_dim=64, mlp_dim=128, head_dim=16)
FROZEN = {
    "NF4": Quantization.NF4(block_size=16),
    "Int8": Quantization.Int8(block_size=16),
    "Int4": Quantization.Int4(block_size=16),
    "FP8": Quantization.FP8(block_size=16),
}


def steps(**fields: Any) -> tuple[list[dict[str, float]], Any]:
    """The metrics of some steps of DPO, and the state after them."""
    asked: dict[str, Any] = {
        "name": "gpu",
        "model": MODEL,
        "objective": Objective.DPO(beta=0.5),
        "data": Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
        "optimizer": Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-2)),
        "batch_size": 8,
        "microbatch_size": 4,
        "steps": STEPS,
        "memory": Memory(reference="online"),
        "precision": Precision(compute="float32"),
    }
    program = compile(Experiment(**{**asked, **fields}))
    state, result = samples.trained(program), []
    for step in range(STEPS):
        state, metrics = program.step(state, samples.pairs(8, seed=step))
        result.append({name: float(value) for name, value in metrics.items()})
    return result, state


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("optimizer", {}),
        ("reference", {}),
        ("frozen", {"adapter": LORA}),
        ("frozen", {"adapter": LORA, "quantization": FROZEN["NF4"]}),
    ],
)
def test_offloaded_arrays_stay_on_the_host_and_change_nothing(part: Any, fields: dict[str, Any]) -> None:
    expected, _ = steps(**fields)
    actual, state = steps(memory=Memory(reference="online", offload=(part,)), **fields)
    placed = {"optimizer": state.optimizer, "reference": state.reference, "frozen": state.frozen}[part]
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(placed) if leaf.ndim}
    assert "pinned_host" in kinds
    for ours, theirs in zip(actual, expected, strict=True):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=2e-6), name


@pytest.mark.parametrize("name", FROZEN)
def test_weights_of_few_bits_have_the_values_of_a_cpu(name: str) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)
    actual = []
    for device in (jax.devices("gpu")[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            actual.append(np.asarray(weight_only_quant.rounded(jnp.asarray(weight), FROZEN[name])))
    # The largest value of a block lies halfway between two integers, at 7.5 or 127.5 scales: rounded to either.
    other = np.abs(actual[0] - actual[1]) > 1e-6 * np.abs(actual[1])
    largest = np.abs(weight).reshape(-1, 16, weight.shape[1]).max(axis=1).repeat(16, axis=0) == np.abs(weight)
    assert not (other & ~largest).any()
    assert not other.any() or name in ("Int8", "Int4")


@pytest.mark.parametrize("name", FROZEN)
def test_a_step_on_weights_of_few_bits(name: str) -> None:
    plain, _ = steps(adapter=LORA)
    actual, _ = steps(adapter=LORA, quantization=FROZEN[name])
    assert actual[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert all(np.isfinite(value) for row in actual for value in row.values())
    nll = -plain[0]["logps/chosen"]
    assert actual[0]["logps/chosen"] == pytest.approx(plain[0]["logps/chosen"], abs=0.15 * nll)


@pytest.mark.parametrize("training", [Quantization.FP8Training(), Quantization.Int8Training()])
def test_products_of_eight_bits_train(training: Quantization) -> None:
    precision = Precision(compute="bfloat16")
    fields: dict[str, Any] = {
        "objective": Objective.ChosenSFT(),
        "memory": Memory(),
        "precision": precision,
    }
    plain, _ = steps(**fields)
    actual, _ = steps(quantization=training, **fields)
    for ours, theirs in zip(actual, plain, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.25)
