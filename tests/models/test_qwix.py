"""Adapters and quantised bases from outside: qwix on one period, stacked and scanned by the decoder."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from nnxdsl.models import params
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.attention import AttentionConfig
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import MLPConfig
from nnxdsl.models.config.layer_pattern import LayerPattern, local_then_global
from nnxdsl.models.decoder import Decoder, LayerGroup, example_inputs
from nnxdsl.models.families.llama3 import LLAMA3

# qwix 0.1.8 calls what flax deprecated; nothing of ours does.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix"),
    pytest.mark.filterwarnings("ignore:The 'm.iter_modules:DeprecationWarning"),
]

# Two periods and a tail. Matrices of this size are multiplied by XLA's library calls, whose sums do not depend on what
# stands around them; smaller ones (16 columns) are fused and would be equal to rounding only.
CONFIG = DecoderConfig(
    vocab_size=50,
    embed_dim=64,
    mlp=MLPConfig(dim=128, activation="gelu_tanh"),
    layers=LayerPattern(num_layers=5, pattern=local_then_global(2)),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    window=4,
    attention=AttentionConfig(query_scale=0.25, query_key_norm="head"),
    max_length=64,
)
LINEARS = r"blocks/\d+/(attention/(query|key|value|output)|mlp/(gate|up|down))"
# Periods of one layer, no tail, fewer norms and a head of its own.
LLAMA = LLAMA3["tiny"].with_fields(
    {"vocab_size": 50, "embed_dim": 64, "mlp.dim": 128, "layers.num_layers": 3, "head_dim": 16}
)
CONFIGS = {"gemma3": CONFIG, "llama3": LLAMA}
BASES: dict[str, dict[str, Any]] = {
    "float": {},
    "nf4": {"weight_qtype": "nf4", "tile_size": 16},
    "int8": {"weight_qtype": "int8", "tile_size": 16},
}


def with_lora(config: DecoderConfig, base: dict[str, Any]) -> Callable[[LayerGroup], LayerGroup]:
    def adapt(period: LayerGroup) -> LayerGroup:
        provider = qwix.LoraProvider([qwix.LoraRule(module_path=LINEARS, rank=3, alpha=6.0, **base)])
        return qwix.apply_lora_to_model(period, provider, *example_inputs(config), rngs=nnx.Rngs(1))

    return adapt


def with_base(config: DecoderConfig, base: dict[str, Any]) -> Callable[[LayerGroup], LayerGroup]:
    def adapt(period: LayerGroup) -> LayerGroup:
        if not base:
            return period
        provider = qwix.PtqProvider([qwix.QuantizationRule(module_path=LINEARS, **base)])
        return qwix.quantize_model(period, provider, *example_inputs(config))

    return adapt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [("gemma3", "float"), ("gemma3", "nf4"), ("gemma3", "int8"), ("llama3", "float"), ("llama3", "nf4")],
)
def test_adapters_on_every_period(family: str, name: str) -> None:
    config = CONFIGS[family]

    def template(adapt: Callable[[LayerGroup], LayerGroup]) -> params.AbstractModel:
        return params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), adapt=adapt))

    policy, base = template(with_lora(config, BASES[name])), template(with_base(config, BASES[name]))

    # All seven weights of every block, in the stack and in the tail, have both adapters, and nothing else has.
    adapters = {path: leaf for path, leaf in policy.variables.items() if "lora" in path}
    linear = r"(attention\.(query|key|value|output)|mlp\.(gate|up|down))\.kernel_lora_[ab]"
    assert all(re.fullmatch(rf"(layers|tail)\.blocks\.\d\.{linear}", path) for path in adapters)
    assert len([path for path in adapters if path.startswith("layers.")]) == config.layers.period * 7 * 2
    assert len([path for path in adapters if path.startswith("tail.")]) == len(config.layers.suffix) * 7 * 2
    for path, leaf in adapters.items():
        assert issubclass(leaf.kind, nnx.LoRAParam)
        assert leaf.shape[:-2] == ((config.layers.periods,) if path.startswith("layers.") else ())
        assert leaf.shape[-1 if path.endswith("_a") else -2] == 3
    for path, leaf in policy.variables.items():
        assert (leaf.axes[0] == "layers") == path.startswith("layers."), path
        assert "layers" not in leaf.axes[1:], path

    # The frozen leaves are the same with and without adapters, so that one set of arrays serves both.
    frozen = {path: leaf for path, leaf in policy.variables.items() if path not in adapters}
    assert {p: (x.shape, x.dtype) for p, x in frozen.items()} == {
        p: (x.shape, x.dtype) for p, x in base.variables.items()
    }
    assert any(path.endswith("kernel.array.qvalue") for path in frozen) == bool(BASES[name])

    # A base with values, quantised as qwix does it: the tail's and each period's kernels.
    values = jax.jit(lambda: params.flatten(Decoder(config, rngs=nnx.Rngs(2), adapt=with_base(config, BASES[name]))))()
    rng = np.random.default_rng(0)
    for path in (path for path in values if path.endswith("norm.scale")):
        values[path] += jnp.asarray(rng.normal(size=values[path].shape) * 0.3, jnp.float32)
    zero_b = {
        path: jnp.asarray(
            rng.normal(size=leaf.shape) * 0.2 if path.endswith("_a") else np.zeros(leaf.shape), leaf.dtype
        )
        for path, leaf in adapters.items()
    }
    tokens, places = jax.random.randint(jax.random.key(0), (2, 9), 0, 50), positions_right_padded(jnp.array([9, 6]), 9)

    def run(template: params.AbstractModel, dtype: Any) -> Callable[..., jax.Array]:
        return jax.jit(lambda values: template.merge(values)(tokens, places, dtype=dtype)[0])

    reference = run(base, jnp.float32)(values)
    assert bool((run(policy, jnp.float32)(values | zero_b) == reference).all())
    if name == "nf4":  # float32 scales and adapters, a bfloat16 stream
        low = run(policy, jnp.bfloat16)(values | zero_b)
        assert low.dtype == jnp.bfloat16
        assert bool((low == run(base, jnp.bfloat16)(values)).all())

    @jax.jit
    def gradient(trained: dict[str, jax.Array], values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def loss(trained: dict[str, jax.Array]) -> jax.Array:
            hidden, *_ = policy.merge(values | trained)(tokens, places, dtype=jnp.float32, remat="full")
            return jnp.sum(jnp.sin(3 * hidden))

        return jax.grad(loss)(trained)

    for path, value in gradient(zero_b, values).items():
        each = jnp.abs(value).reshape(-1, *value.shape[-2:]).max(axis=(1, 2))  # one figure per period
        assert bool(jnp.isfinite(each).all()), path
        assert bool((each > 0).all()) == path.endswith("_b"), path

    if not BASES[name]:
        # W + A B alpha / rank, per period: the adapters land in their own layers.
        full_b = {
            path: value if path.endswith("_a") else jnp.asarray(rng.normal(size=value.shape) * 0.1, value.dtype)
            for path, value in zero_b.items()
        }
        merged = dict(values)
        for path in (path.removesuffix("_lora_a") for path in adapters if path.endswith("_a")):
            merged[path] = values[path] + full_b[path + "_lora_a"] @ full_b[path + "_lora_b"] * (6.0 / 3)
        tuned = run(policy, jnp.float32)(values | full_b)
        assert float(jnp.abs(tuned - reference).max()) > 0.1
        np.testing.assert_allclose(tuned, run(base, jnp.float32)(merged), atol=2e-5, rtol=0)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_the_backward_pass_keeps_no_unpacked_weight(name: str) -> None:
    """What is kept has the size of the few bits: an unpacked copy would be as large as the weight was before."""
    template = params.abstract(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), adapt=with_lora(CONFIG, BASES[name])))
    leaves = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in template.variables.items()}
    trained = {path for path in leaves if path.endswith(("_lora_a", "_lora_b"))}
    kept: list[tuple[int, ...]] = []

    def trace(leaves: dict[str, jax.Array]) -> None:
        def read(trainable: dict[str, jax.Array]) -> jax.Array:
            model: Any = template.merge({**leaves, **trainable})
            return model(jnp.zeros((2, 9), jnp.int32), positions_right_padded(jnp.full((2,), 9), 9), dtype=jnp.float32)[
                0
            ]

        _, back = jax.vjp(read, {path: leaves[path] for path in trained})
        fields = {id(leaf) for leaf in jax.tree.leaves(leaves)}
        kept.extend(leaf.shape for leaf in jax.tree.leaves(back) if id(leaf) not in fields)

    jax.eval_shape(trace, leaves)
    weights = {shape for path, leaf in template.variables.items() if "qvalue" in path for shape in (leaf.shape,)}
    assert weights
    assert len(kept) > 10
    assert not weights & set(kept)
