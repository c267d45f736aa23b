"""One step: policy and reference exactly equal at first, what moves and what does not, parts that add up."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Memory, Objective, Precision, Quantization, compile
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.program.compile import TrainState

LORA = Adapter.LoRA(rank=2, alpha=4.0)
FULL = Memory(remat="full")
LOW = Precision(compute="bfloat16")
# Widths that no vector unit divides, a tail of one layer, an odd vocabulary.
ODD = Small(vocab_size=53, embed_dim=20, mlp_dim=28, layers=3, heads=3, head_dim=6)
# One layer in the body of the scan, which compiles in half the time.
SHALLOW = Small(layers=2, pattern=1)
NF4, INT8 = Quantization.NF4(block_size=8), Quantization.Int8(block_size=4)

# (fields, prompt and response length). Every adapter, base, remat, number of parts and batch size is here.
EQUAL: dict[str, tuple[dict[str, Any], int, int]] = {
    "full, 1": ({"batch_size": 1, "model": SHALLOW}, 8, 8),
    "full, 16 in 4, remat": ({"batch_size": 16, "microbatch_size": 4, "memory": FULL}, 8, 8),
    "full, 3, odd": ({"batch_size": 3, "model": ODD, "memory": Memory(logprob_tokens=7)}, 7, 5),
    "lora, 3, odd, remat": ({"adapter": LORA, "batch_size": 3, "model": ODD, "memory": FULL}, 7, 5),
    "lora, 16 in 2": ({"adapter": LORA, "batch_size": 16, "microbatch_size": 8, "model": SHALLOW}, 8, 8),
    "nf4, 16 in 4": (
        {"adapter": LORA, "quantization": NF4, "batch_size": 16, "microbatch_size": 4, "model": SHALLOW},
        8,
        8,
    ),
    "int8, 1, odd, remat": (
        {
            "adapter": LORA,
            "quantization": Quantization.Int8(block_size=2),
            "batch_size": 1,
            "model": ODD,
            "memory": FULL,
        },
        7,
        5,
    ),
    "full, 4, bfloat16": ({"precision": LOW, "model": SHALLOW}, 8, 8),
    "lora, 4 in 2, bfloat16": ({"adapter": LORA, "precision": LOW, "microbatch_size": 2, "model": SHALLOW}, 8, 8),
    "nf4, 4, bfloat16": ({"adapter": LORA, "quantization": NF4, "precision": LOW, "model": SHALLOW}, 8, 8),
}


# Each takes some ten seconds to compile; the others cover what these combine anew.
SLOW = set(EQUAL) - {"lora, 4 in 2, bfloat16"}


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in EQUAL])
def test_policy_and_reference_are_equal_at_first(
    name: str,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
) -> None:
    fields, prompt, response = EQUAL[name]
    program = compile(experiment(**fields))
    state = trained(program)
    batch = pairs(program.experiment.batch_size, prompt=prompt, response=response)
    kept = jax.device_get((state.frozen, state.reference))
    before = jax.device_get(state.trainable)
    assert bool(state.reference) == (program.experiment.adapter is None)
    assert {leaf.dtype for leaf in state.trainable.values()} == {jnp.dtype("float32")}

    held_out = {key: float(total) for key, (total, _) in program.evaluate(state, batch).items()}
    state, first = program.step(state, batch)
    for metrics in (held_out, first):
        assert metrics["rewards/chosen"] == metrics["rewards/rejected"] == metrics["rewards/margins"] == 0.0
        assert metrics["rewards/accuracies"] == 0.0
    # A mean of 16 rows has two roundings of float32, of 6e-8 each.
    assert float(first["loss"]) == pytest.approx(math.log(2), abs=5e-7)
    assert held_out["loss"] / len(batch.weight) == pytest.approx(math.log(2), abs=2e-7)
    assert held_out["logps/chosen"] / len(batch.weight) == pytest.approx(float(first["logps/chosen"]), rel=1e-5)
    assert float(first["grad_norm"]) > 0

    moved = {path for path, value in before.items() if not np.array_equal(value, state.trainable[path])}
    if program.experiment.adapter is not None:
        # B is zero, so that at first A has no gradient, and B has.
        assert moved == {path for path in before if path.endswith("_lora_b")}
    state, second = program.step(state, batch)
    assert float(second["rewards/margins"]) > 0 > float(second["loss"]) - math.log(2)
    assert all(np.isfinite(float(value)) for value in second.values())
    moved = {path for path, value in before.items() if not np.array_equal(value, state.trainable[path])}
    # Roundings of bfloat16 may leave a gradient of exactly zero somewhere, float32 does not.
    assert moved == set(before) or program.blueprint.compute != jnp.float32
    assert int(state.step) == 2
    after = jax.device_get((state.frozen, state.reference))
    assert jax.tree.all(jax.tree.map(np.array_equal, kept, after))


def test_gradients_are_those_of_the_trainable_leaves(
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    program = compile(experiment(adapter=LORA, quantization=INT8, model=SHALLOW))
    state = with_b(trained(program))
    gradients, _ = jax.jit(program.policy_loss.grads)(state.trainable, state.frozen, state.reference, pairs(4))
    assert gradients.keys() == state.trainable.keys()
    for path, gradient in gradients.items():
        assert gradient.dtype == jnp.float32
        assert bool(jnp.isfinite(gradient).all())
        assert bool((jnp.abs(gradient) > 0).any()), path


@pytest.mark.parametrize("rows", [1, 3])
def test_swapping_negates_the_margin(
    rows: int,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    program = compile(experiment(adapter=LORA, batch_size=rows, model=SHALLOW))
    state = with_b(trained(program))
    batch = pairs(rows)
    swapped = batch._replace(
        chosen=batch.rejected,
        rejected=batch.chosen,
        chosen_length=batch.rejected_length,
        rejected_length=batch.chosen_length,
    )
    other, back = (jax.device_get(program.evaluate(state, each)) for each in (batch, swapped))
    assert abs(other["rewards/margins"].total) > 0.01
    np.testing.assert_allclose(other["rewards/margins"].total, -back["rewards/margins"].total, rtol=1e-4)
    np.testing.assert_allclose(other["logps/chosen"].total, back["logps/rejected"].total, rtol=1e-6)
    for name in ("entropy", "mean_token_accuracy"):
        np.testing.assert_allclose(other[name].total, back[name].total, rtol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("adapter", [pytest.param(None, marks=pytest.mark.slow), LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "objective",
    [Objective.DPO(beta=0.5), pytest.param(Objective.SFT(loss_on="all"), marks=pytest.mark.slow)],
    ids=["dpo", "sft"],
)
def test_parts_add_up_to_the_batch(
    objective: Objective,
    adapter: Adapter | None,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    sequences: Callable[..., SequenceBatch],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    """In 1, 2 (pairs) and 4 parts: unequal lengths, two rows of weight 0, and a part (of four) in which all are."""
    batch = (pairs if objective.batch_kind == "pairs" else sequences)(8, seed=1)
    # Part k of n has rows k, k + n, ...: with four parts, rows 1 and 5 are one.
    batch = batch._replace(weight=np.array([1, 0, 1, 1, 1, 0, 1, 1], np.float32))
    make = functools.partial(experiment, objective=objective, adapter=adapter, model=SHALLOW)
    actual = {}
    all_parts = (1, 2, 4) if objective.batch_kind == "pairs" else (1, 4)
    for parts in all_parts:
        program = compile(make(batch_size=8, microbatch_size=8 // parts))
        state, metrics = program.step(with_b(trained(program)), batch)
        actual[parts] = jax.device_get((state.trainable, metrics))
    for parts in all_parts[1:]:
        assert_same_metrics(actual[parts][1], actual[1][1])
        for path, value in actual[1][0].items():
            np.testing.assert_allclose(actual[parts][0][path], value, rtol=1e-6, atol=1e-7, err_msg=path)

    # The same without the rows of weight 0.
    program = compile(make(batch_size=6))
    rest = jax.tree.map(lambda x: np.delete(x, [1, 5], axis=0), batch)
    ratios = jax.device_get(program.evaluate(with_b(trained(program)), rest))
    metrics = {name: ratio.total / ratio.count for name, ratio in ratios.items()}
    assert_same_metrics(metrics, {name: actual[1][1][name] for name in metrics})


def assert_same_metrics(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        # Rewards are small differences of log-probabilities of about 50, and have the rounding of those.
        atol = 2e-6 if name.startswith("rewards/") else 1e-7
        np.testing.assert_allclose(result[name], value, rtol=1e-6, atol=atol, err_msg=name)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("objective", [Objective.DPO(beta=0.5), Objective.SFT(loss_on="all")], ids=["dpo", "sft"])
def test_no_weight_is_no_loss_and_no_gradient(
    objective: Objective,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    sequences: Callable[..., SequenceBatch],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    program = compile(experiment(objective=objective, adapter=LORA, microbatch_size=2, model=SHALLOW))
    state = with_b(trained(program))
    before = jax.device_get(state.trainable)
    batch = (pairs if objective.batch_kind == "pairs" else sequences)(4, fill=4)
    state, metrics = program.step(state, batch)
    actual = {name: float(value) for name, value in metrics.items() if name != "learning_rate"}
    assert {name: actual.pop(name) for name in ("loss", "grad_norm", "num_tokens")} == {
        "loss": 0.0,
        "grad_norm": 0.0,
        "num_tokens": 0.0,
    }
    assert {name for name, value in actual.items() if not math.isnan(value)} == set()  # means over nothing
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.trainable)))


@pytest.mark.extended
def test_the_two_turns_stay_one_loop(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    """Were the loop over reference and policy unrolled, equal models would be compiled into two different kernels."""
    program = compile(experiment(model=SHALLOW))
    state = trained(program)
    batch = program.shard_batch(pairs(4))
    arguments, vocab_size = (state.trainable, state.frozen, state.reference, batch), program.blueprint.config.vocab_size
    for function in (program.policy_loss.grads, program.policy_loss.evaluate):
        text = jax.jit(function).lower(*arguments).compile().as_text()
        assert text is not None
        products = re.findall(rf' = f32\[\d+,{vocab_size}\]\S* dot\(.*op_name="([^"]*/dot_general)"', text)
        forward = [name for name in products if "transpose" not in name]
        assert len(forward) == 1, "the product with the head stands there once, for both models"
        assert " dot(" not in text[text.index("ENTRY") :]
