"""Adapters and few bits on the weights of experts, and experts on meshes: nothing changes but what was asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl import Adapter, Quantization
from nnxdsl.adapters import lora as adapters
from nnxdsl.adapters import lora_math, targets, weight_only_quant
from nnxdsl.adapters.lora import AdaptedExperts, abstract_decoder
from nnxdsl.models import params
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.mixtral import MIXTRAL
from nnxdsl.models.moe.layer import ExpertLinear

COUNT, IN, OUT = 4, 16, 24
LORA = Adapter.LoRA(rank=2, alpha=6.0, targets=("mlp",))
QUANTIZATIONS = {"nf4": Quantization.NF4(block_size=8), "int8": Quantization.Int8(block_size=4)}


def slots(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Vectors of slots and their experts in order; some of no expert."""
    expert = jnp.asarray(np.sort(rng.choice([0, 1, 3, COUNT], 2 * 5 * 2)), jnp.int32).reshape(2, 5, 2)
    return jnp.asarray(rng.normal(size=(2, 5, 2, IN)), jnp.float32), expert


def plain() -> ExpertLinear:
    linear = ExpertLinear(COUNT, IN, OUT, axes=("embed", "mlp"), bias=True, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    linear.bias = nnx.Param(jnp.asarray(np.random.default_rng(1).normal(size=(COUNT, OUT)), jnp.float32))
    return linear


def leaves(module: nnx.Module) -> tuple[params.AbstractModel, dict[str, jax.Array]]:
    graphdef, state = nnx.split(module)
    return params.AbstractModel(graphdef, nnx.to_flat_state(state)), params.flatten(module)


@pytest.mark.extended
def test_an_adapter_is_the_merged_weight_in_value_and_gradient() -> None:
    rng = np.random.default_rng(0)
    x, expert = slots(rng)
    base, ours = leaves(plain())
    policy, values = leaves(AdaptedExperts(plain(), LORA, None))
    assert set(values) - set(ours) == {"kernel_lora_a", "kernel_lora_b"}

    @partial(jax.jit, static_argnums=0)
    def run(template: params.AbstractModel, values: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        module: Any = template.merge(values)
        return module(x, expert)

    # B is zero at first: the identity, bit for bit.
    assert values["kernel_lora_a"].any()
    np.testing.assert_array_equal(run(policy, values, x), run(base, ours, x))

    a, b = (jnp.asarray(rng.normal(size=values[f"kernel_lora_{end}"].shape), jnp.float32) for end in "ab")
    assert (a.shape, b.shape) == ((COUNT, IN, 2), (COUNT, 2, OUT))

    def adapted(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(run(policy, {**values, "kernel_lora_a": a, "kernel_lora_b": b}, x)))

    def merged(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        kernel = ours["kernel"] + 3.0 * jnp.einsum("eir,ero->eio", a, b)
        return jnp.sum(jnp.sin(run(base, {**ours, "kernel": kernel}, x)))

    actual, wanted = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(a, b, x) for f in (adapted, merged))
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=4e-4, atol=4e-4), actual, wanted)
    kernel = ours["kernel"] + 3.0 * jnp.einsum("eir,ero->eio", a, b)
    np.testing.assert_allclose(lora_math.merge(LORA, ours["kernel"], a, b), kernel, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small", [None, QUANTIZATIONS["nf4"]], ids=["float32", "nf4"])
def test_each_expert_has_a_magnitude_of_its_own(small: Quantization | None) -> None:
    rng = np.random.default_rng(0)
    x, expert = slots(rng)
    dora = Adapter.DoRA(rank=2, alpha=6.0, targets=("mlp",))
    base, ours = leaves(plain())
    kernel = ours["kernel"] if small is None else weight_only_quant.rounded(ours["kernel"], small)
    policy, values = leaves(AdaptedExperts(plain(), dora, small))
    assert values["kernel_lora_m"].shape == (COUNT, OUT)
    values |= {f"kernel_lora_{end}": jnp.asarray(rng.normal(size=values[f"kernel_lora_{end}"].shape), jnp.float32)
               for end in "ab"}  # fmt: skip
    values["kernel_lora_m"] = jnp.asarray(rng.uniform(1.0, 5.0, (COUNT, OUT)), jnp.float32)
    merged = lora_math.merge(dora, kernel, *(values[f"kernel_lora_{end}"] for end in "abm"))
    np.testing.assert_allclose(jnp.linalg.norm(merged, axis=1), values["kernel_lora_m"], rtol=1e-5)

    @partial(jax.jit, static_argnums=0)
    def run(template: params.AbstractModel, values: dict[str, jax.Array]) -> jax.Array:
        module: Any = template.merge(values)
        return jnp.where((expert < COUNT)[..., None], module(x, expert), 0)

    actual, wanted = run(policy, values), run(base, {**ours, "kernel": merged})
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_few_bits_compute_what_they_stand_for(name: str) -> None:
    rng = np.random.default_rng(0)
    x, expert = slots(rng)
    base, ours = leaves(plain())
    policy, values = leaves(AdaptedExperts(plain(), LORA, QUANTIZATIONS[name]))
    wanted_leaves = weight_only_quant.quantize(ours["kernel"], QUANTIZATIONS[name])
    for path, wanted in zip((weight_only_quant.QVALUE, weight_only_quant.SCALE), wanted_leaves, strict=True):
        np.testing.assert_array_equal(values["kernel" + path], wanted)
    restored = {**ours, "kernel": weight_only_quant.rounded(ours["kernel"], QUANTIZATIONS[name])}
    assert float(jnp.abs(restored["kernel"] - ours["kernel"]).max()) > 1e-3

    def loss(template: params.AbstractModel, values: dict[str, jax.Array]) -> Callable[[jax.Array], jax.Array]:
        module: Any = template.merge(values)
        return lambda x: jnp.sum(jnp.sin(module(x, expert)))

    actual, wanted = (jax.jit(jax.value_and_grad(loss(*inputs)))(x) for inputs in ((policy, values), (base, restored)))
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-6, atol=1e-6), actual, wanted)


def test_the_backward_pass_keeps_no_unpacked_kernel() -> None:
    x, expert = slots(np.random.default_rng(0))
    template, values = leaves(AdaptedExperts(plain(), LORA, QUANTIZATIONS["nf4"]))
    trained = {path: value for path, value in values.items() if lora_math.is_adapter(path)}
    kept: list[tuple[int, ...]] = []

    def trace(values: dict[str, jax.Array]) -> None:
        def read(trained: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            module: Any = template.merge({**values, **trained})
            return module(x, expert)

        _, back = jax.vjp(read, {path: values[path] for path in trained}, x)
        fields = {id(leaf) for leaf in jax.tree.leaves(values)}
        kept.extend(leaf.shape for leaf in jax.tree.leaves(back) if id(leaf) not in fields)

    jax.eval_shape(trace, values)
    assert kept
    assert (COUNT, IN, OUT) not in kept


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:The 'm.iter_modules:DeprecationWarning")
@pytest.mark.parametrize("quantization", [None, QUANTIZATIONS["nf4"]], ids=["lora", "qlora"])
def test_a_decoder_with_experts_has_adapters_exactly_at_the_targets(quantization: Any) -> None:
    config = MIXTRAL["tiny"].with_fields(
        {
            "vocab_size": 32,
            "embed_dim": 32,
            "mlp.dim": 16,
            "layers.num_layers": 2,
            "feed_forward": attrs.evolve(MIXTRAL["tiny"].moe, mlp_dim=16, shared_expert_dim=8),
        }
    )
    lora = Adapter.LoRA(rank=2, alpha=6.0, targets=("attention.query", "mlp"))
    base = abstract_decoder(config)
    change = adapters.adapt(lora, quantization, config)
    policy = params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), adapt=change))
    assert targets.problems(lora, quantization, base.variables) == []
    assert targets.missed(lora, quantization, policy, base.variables) == []
    layers = ["attention.query", *(f"mlp.{ours}{name}" for ours in ("", "shared.") for name in ("gate", "up", "down"))]
    paths = {f"layers.blocks.0.{layer}.kernel" for layer in layers}
    added = {path for path in policy.variables if lora_math.is_adapter(path)}
    assert added == {path + end for path in paths for end in (lora_math.A, lora_math.B)}
    for path in added:
        leaf, ours = policy.variables[path], base.variables[path[: path.rindex("_lora")]]
        is_a = path.endswith(lora_math.A)
        assert leaf.axes == ((*ours.axes[:-1], "rank") if is_a else (*ours.axes[:-2], "rank", ours.axes[-1]))
        assert leaf.shape == ((*ours.shape[:-1], 2) if is_a else (*ours.shape[:-2], 2, ours.shape[-1]))
        assert issubclass(leaf.kind, nnx.LoRAParam)
    if quantization is not None:
        scale = policy.variables["layers.blocks.0.mlp.down.kernel" + weight_only_quant.SCALE]
        assert scale.axes == ("layers", "experts", "blocks", "embed")
        assert scale.shape == (2, config.moe.num_experts, 2, 32)
        return

    rng = np.random.default_rng(0)
    values = {
        path: jnp.asarray(
            rng.normal(size=leaf.shape) * leaf.shape[-2 if len(leaf.shape) > 1 else -1] ** -0.5, leaf.dtype
        )
        for path, leaf in policy.variables.items()
    }
    merged = {path: values[path] for path in base.variables}
    for path in paths:
        merged[path] = lora_math.merge(lora, values[path], values[path + lora_math.A], values[path + lora_math.B])
    tokens, places = jnp.asarray(rng.integers(0, 32, (2, 7))), positions_right_padded(jnp.array([7, 4]), 7)

    @jax.jit
    def hidden(values: dict[str, jax.Array]) -> jax.Array:
        template = policy if len(values) == len(policy.variables) else base
        model: Any = template.merge(values)
        return model(tokens, places, dtype=jnp.float32)[0]

    actual = hidden(values)
    assert float(jnp.abs(actual - hidden({path: values[path] for path in base.variables})).max()) > 0.1
    np.testing.assert_allclose(actual, hidden(merged), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_meshes_and_one_device_agree(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("adapters/on_experts.py")
    alone = report.pop("one")
    assert [entry["spec"] for entry in report.values()] == [
        "('expert', None, None)",
        "('expert', 'fsdp', 'tensor')",
        "(None, 'context', 'tensor')",
    ]
    for name, entry in report.items():
        # Sums over tokens are made in another order: a few units in the last place of gradients that reach 10.
        assert max(entry["difference"]) == pytest.approx(0, abs=2e-5), name
        # Loops count once, so this is what stands around them; no device does the work of all.
        assert entry["flops"] < 0.6 * alone["flops"], name
