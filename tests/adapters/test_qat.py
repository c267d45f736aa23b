"""Few-bit formats against their definitions in numpy, and training whose products are rounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Objective, PlanError, Quantization, SpecError, compile
from nnxdsl.adapters import weight_only_quant
from nnxdsl.planning import plan
from nnxdsl.program.blueprint import Blueprint, build_blueprint

# The values of NF4 as the code of its paper has them, arXiv:2305.14314, appendix E.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def on_grid(x: np.ndarray, kind: str) -> np.ndarray:
    """Values within the largest magnitude of a format, rounded to it."""
    if kind == "nf4":
        return NF4[np.abs(x[..., None] - NF4).argmin(-1)]
    if kind == "fp8":
        return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.clip(np.round(x), -LARGEST[kind] - 0.5, LARGEST[kind] - 0.5)


LARGEST = {"nf4": 1.0, "int4": 7.5, "int8": 127.5, "fp8": 448.0}
KINDS = {"nf4": Quantization.NF4, "int4": Quantization.Int4, "int8": Quantization.Int8, "fp8": Quantization.FP8}
BYTES = {"nf4": 0.5, "int4": 0.5, "int8": 1.0, "fp8": 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_formats_are_those_of_their_definitions(kind: str) -> None:
    weight = np.random.default_rng(0).standard_normal((3, 64, 24)).astype(np.float32)
    blocks = weight.astype(np.float64).reshape(3, 4, 16, 24)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / LARGEST[kind]
    expected = (on_grid((blocks / scale).astype(np.float32), kind) * scale).reshape(weight.shape)
    spec = KINDS[kind](block_size=16)
    actual = np.asarray(weight_only_quant.rounded(jnp.asarray(weight), spec), np.float64)
    # A value in the middle of two may fall to either side. Such are few, but for the largest negative ones of integers:
    # those are the middle between -7 and -8, -127 and -128.
    off = np.abs(actual - expected) > 1e-5 * np.abs(expected) + 1e-6
    largest = (np.abs(blocks) == np.abs(blocks).max(axis=2, keepdims=True)).reshape(weight.shape)
    assert off[~largest].mean() == pytest.approx(0, abs=2e-3)
    assert (np.abs(actual - expected) <= (1.001 * np.broadcast_to(scale, blocks.shape)).reshape(weight.shape)).all()
    values, scales = weight_only_quant.quantize(jnp.asarray(weight), spec)
    assert values.shape == weight.shape
    np.testing.assert_allclose(scales, scale[:, :, 0], rtol=1e-6)
    again = weight_only_quant.dequantize(values, scales, spec)
    np.testing.assert_array_equal(again, actual)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_their_bytes(kind: str, experiment: Callable[..., Experiment]) -> None:
    blueprint = build_blueprint(experiment(quantization=KINDS[kind](block_size=8), adapter=Adapter.LoRA(rank=2)))
    placed = blueprint.layout.arrays["frozen"]
    values = placed["layers.blocks.0.mlp.up.kernel.array.qvalue"]
    scales = placed["layers.blocks.0.mlp.up.kernel.array.scale"]
    assert (values.shape, values.bytes) == ((2, 16, 32), 2 * 16 * 32 * BYTES[kind])
    assert (scales.shape, scales.dtype) == ((2, 2, 32), "float32")
    share = f"{BYTES[kind] / 4 + 1 / 8:.1%} of float32"
    assert re.fullmatch(rf"{kind}: 14 arrays, a scale for each 8 inputs: .* MiB .*, {share}", describe(blueprint), re.I)


def describe(blueprint: Blueprint) -> str:
    return str(plan._quantization(blueprint))


def test_a_plan_names_what_is_rounded(experiment: Callable[..., Experiment]) -> None:
    blueprint = build_blueprint(experiment(quantization=Quantization.QAT(weights="int4", targets=("mlp",))))
    assert describe(blueprint) == "QAT: products of 6 arrays, a scale for each output; the weights stay float32"
    assert describe(build_blueprint(experiment())) == "None"


def logp(program: Any, leaves: Any, batch: Any) -> np.ndarray:
    return np.asarray(program.policy_loss.score(leaves, {}, batch).token_stats.logp)


@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_aware_training_computes_with_the_weights_that_will_be_kept(
    kind: Any, experiment: Callable[..., Experiment], trained: Callable[..., Any], sequences: Callable[..., Any]
) -> None:
    fields = {"model": Small(layers=1, pattern=1), "objective": Objective.SFT(loss_on="all")}
    aware = compile(experiment(**fields, quantization=Quantization.QAT(weights=kind, block_size=8)))
    plain = compile(experiment(**fields))
    assert set(aware.blueprint.trainable) == set(plain.blueprint.trainable)
    state, other, batch = trained(aware), trained(plain), sequences(4)
    kept = {
        path: weight_only_quant.rounded(leaf, KINDS[kind](block_size=8)) if path.endswith(".kernel") else leaf
        for path, leaf in state.trainable.items()
    }
    np.testing.assert_allclose(logp(aware, state.trainable, batch), logp(plain, kept, batch), rtol=1e-4, atol=1e-5)
    assert np.abs(logp(plain, kept, batch) - logp(plain, state.trainable, batch)).max() > 1e-3
    # Gradients pass through the rounding: near those without, and none of them is lost.
    first = {path: np.asarray(leaf) for path, leaf in state.trainable.items()}
    state, _ = aware.step(state, batch)
    other, _ = plain.step(other, batch)
    for path, leaf in state.trainable.items():
        moved, expected = np.asarray(leaf) - first[path], np.asarray(other.trainable[path]) - first[path]
        assert np.linalg.norm(moved - expected) < (0.2 if kind == "int8" else 1.0) * np.linalg.norm(expected), path


FORMATS = {
    "int8": (Quantization.Int8Training(), ("i8", "i8"), 21),
    "fp8": (Quantization.FP8Training(), ("f8E4M3FN", "f8E5M2"), 14),
}
"""What is asked for, the dtypes of values and of gradients, and how many products of seven layers have the latter."""


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_all_products_of_linear_layers_are_rounded(
    kind: str, experiment: Callable[..., Experiment], trained: Callable[..., Any], sequences: Callable[..., Any]
) -> None:
    spec, (inner, gradient), count = FORMATS[kind]
    fields = {"model": Small(layers=1, pattern=1), "objective": Objective.SFT(loss_on="all")}
    program, plain = compile(experiment(**fields, quantization=spec)), compile(experiment(**fields))
    batch = sequences(4)
    products = [line for line in program.lower(batch).as_text().splitlines() if "stablehlo.dot_general" in line]
    kinds = [tuple(re.findall(r"x([a-zA-Z]\w+)>", line)[:2]) for line in products]
    assert kinds.count((inner, inner)) >= 7  # forward, and with remat again
    assert sum(gradient in pair for pair in kinds) >= count
    state, other = trained(program), trained(plain)
    for _ in range(2):
        state, metrics = program.step(state, batch)
        other, expected = plain.step(other, batch)
        difference = abs(float(metrics["loss"] - expected["loss"]))
        assert difference == pytest.approx(0, abs=0.05 * float(expected["loss"]))
        assert difference > 0


def test_what_cannot_be_rounded_or_trained_is_refused(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(SpecError) as caught:
        experiment(quantization=Quantization.Int4(), adapter=None)
    assert "quantization: Quantization.Int4 freezes the base, so there is nothing to train" in str(caught.value)
    with pytest.raises(SpecError) as caught:
        experiment(quantization=Quantization.QAT(), adapter=Adapter.LoRA(rank=2))
    assert str(caught.value).endswith(
        "quantization: Quantization.QAT is for weights that are trained, Adapter.LoRA freezes them; use "
        "Quantization.Int8()"
    )
    with pytest.raises(PlanError) as refused:
        build_blueprint(experiment(quantization=Quantization.Int8Training(block_size=5, targets=("mlp", "atention"))))
    text = str(refused.value)
    assert "quantization.targets.1: 'atention' matches no linear layer; did you mean 'attention'?" in text
    assert "quantization.block_size: 16 inputs of blocks.*.mlp.gate are not divisible by blocks of 5" in text
