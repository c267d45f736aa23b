"""Gated DeltaNet against stored figures of transformers; rows of every layout against rows of one sequence each."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl.models import params
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig
from nnxdsl.models.deltanet.layer import GatedDeltaNet, empty_state
from nnxdsl.models.deltanet.recurrence import Tokens, chunked_delta_rule, step
from nnxdsl.models.recurrent.order import Order
from tests.models.qwix_mixers import check_from_outside
from tests.models.recurrent import (
    FIGURES,
    GRADIENTS,
    Layer,
    Leaves,
    check_decoding,
    check_packed_rows,
    check_pairs,
    check_reference,
    check_unknown_rows,
    leaves_of,
    relative,
    view,
)

WEIGHTS = {
    "inputs.kernel": "in_proj_qkvz.weight",
    "rates.kernel": "in_proj_ba.weight",
    "conv.weight": "conv1d.weight",
    "decay_log": "A_log",
    "decay_bias": "dt_bias",
    "norm.scale": "norm.weight",
    "output.kernel": "out_proj.weight",
}


def load(name: str, chunk: int = 16) -> Layer:
    figures = dict(np.load(FIGURES / f"{name}.npz"))
    sizes = {key.removeprefix("config."): int(value) for key, value in figures.items() if key.startswith("config.")}
    config = GatedDeltaNetConfig(conv_kernel=sizes.pop("conv"), **sizes)
    embed = figures["x"].shape[-1]

    def build() -> GatedDeltaNet:
        return GatedDeltaNet(embed, config, norm_eps=0.05, rngs=nnx.Rngs(0), param_dtype=jnp.float32, chunk=chunk)

    return Layer(config, params.abstract(build), leaves_of(WEIGHTS, figures, "weight."), figures)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return load("delta_grouped")


def test_parameters_and_their_axes(layer: Layer) -> None:
    assert {path: (leaf.shape, leaf.axes) for path, leaf in layer.template.variables.items()} == {
        "conv.weight": ((2 * 16 + 24, 1, 4), ("conv", None, None)),
        "decay_bias": ((4,), ("heads",)),
        "decay_log": ((4,), ("heads",)),
        "inputs.kernel": ((20, 2 * 16 + 2 * 24), ("embed", "heads")),
        "norm.scale": ((6,), ("head_dim",)),
        "output.kernel": ((24, 20), ("heads", "embed")),
        "rates.kernel": ((20, 8), ("embed", "heads")),
    }
    state = jax.eval_shape(lambda: empty_state(layer.config, 3, jnp.bfloat16))
    assert (state.conv_state.shape, state.conv_state.dtype) == ((3, 56, 3), jnp.bfloat16)
    assert (state.memory.shape, state.memory.dtype) == ((3, 4, 8, 6), jnp.float32)
    for fields, problem in (
        ({"key_heads": 2, "value_heads": 3}, "value_heads=3 is not a multiple of key_heads=2"),
        ({"key_heads": 0, "value_heads": 3}, "key_heads must be above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=problem):
            GatedDeltaNetConfig(**fields, key_head_dim=4, value_head_dim=4)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("delta_grouped", 16),
        pytest.param("delta_grouped", 64, marks=pytest.mark.slow),
        pytest.param("delta_single", 64, marks=pytest.mark.slow),
    ],
)
def test_as_transformers_has_it(name: str, chunk: int) -> None:
    # The memory is made of differences of sums of decays, which reach 100 in a chunk of 64.
    check_reference(load(name, chunk), WEIGHTS, out=2e-6, memory=5e-5, to_x=5e-6)


@pytest.mark.extended
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_the_prompt_of_a_pair_is_computed_once(layer: Layer, gradients: bool) -> None:
    check_pairs(layer, gradients)


@pytest.mark.extended
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_rows_of_pairs_side_by_side(layer: Layer, gradients: bool) -> None:
    check_packed_rows(layer, gradients)


@pytest.mark.slow
def test_where_nothing_is_known_of_the_row(layer: Layer) -> None:
    check_unknown_rows(layer)


@pytest.mark.slow
def test_token_by_token(layer: Layer) -> None:
    check_decoding(layer)


def one_by_one(tokens: Tokens, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    def one(memory: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
        out, memory = step(jax.tree.map(lambda part: part[:, None], token), jnp.ones(len(memory), bool), memory)
        return memory, out[:, 0]

    memory, out = jax.lax.scan(one, memory, jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), tokens))
    return jnp.moveaxis(out, 0, 1), memory


@pytest.mark.extended
def test_memories_that_keep_all_or_nothing() -> None:
    """One key for all tokens, corrected in full: the inverse's powers would overflow; decays whose products vanish."""
    rng = np.random.default_rng(0)
    order = Order(jnp.ones((1, 64), jnp.int32), None)

    @jax.jit
    def both(tokens: Tokens, memory: jax.Array) -> Any:
        actual = []
        for run in (lambda *inputs: chunked_delta_rule(inputs[0], order, inputs[1]), one_by_one):
            out, back = jax.vjp(run, tokens, memory)
            actual.append((out, back(jax.tree.map(jnp.ones_like, out))))
        return actual

    for decay, alike in ((0.0, True), (-200.0, False), (-0.01, True)):
        query, key = (jnp.asarray(rng.normal(size=(1, 64, 1, 4)), jnp.float32) for _ in range(2))
        if alike:
            key = jnp.broadcast_to(key[:, :1], key.shape)
        value = jnp.asarray(rng.normal(size=(1, 64, 1, 1, 3)), jnp.float32)
        tokens = Tokens(query, key, value, jnp.full((1, 64, 1, 1), decay), jnp.ones((1, 64, 1, 1)))
        mine, wanted = both(tokens, jnp.asarray(rng.normal(size=(1, 1, 1, 4, 3)), jnp.float32))
        jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=2e-5), mine, wanted)


def test_the_backward_pass_keeps_what_the_linear_layers_gave(layer: Layer) -> None:
    """And nothing of what the convolution and the rule make of it, which is many times as large."""
    length = 1024
    row, places = rows.pair(512, 256), positions_right_padded(jnp.full((1,), length), length)
    leaves = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in layer.template.variables.items()}
    kept: list[jax.ShapeDtypeStruct] = []

    def trace(leaves: Leaves, x: jax.Array) -> None:
        _, back = jax.vjp(lambda leaves, x: layer(leaves, x, places, row)[0], leaves, x)
        kept.extend(jax.tree.leaves(back))

    jax.eval_shape(trace, leaves, jax.ShapeDtypeStruct((1, length, 20), jnp.float32))
    # x; inputs and rates; of the norm and the gate after the rule some arrays of the width of the values.
    widths = 20 + (80 + 8) + 12 * 24
    assert sum(leaf.size for leaf in kept) < length * widths + 50_000


@pytest.mark.slow
def test_half_precision(layer: Layer) -> None:
    x = jnp.asarray(layer.figures["x"], jnp.bfloat16)
    places, row = positions_right_padded(jnp.full((2,), x.shape[1]), x.shape[1]), rows.sequence(x.shape[1])
    out, state = jax.jit(lambda leaves, x: layer(leaves, x, places, row))(layer.leaves, x)
    assert (out.dtype, state.conv_state.dtype, state.memory.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    relative(out.astype(jnp.float32), layer.figures["out"], 0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")
@pytest.mark.filterwarnings("ignore:The 'm.iter_modules:DeprecationWarning")
def test_adapters_and_few_bits_from_outside() -> None:
    """On every linear layer and nothing else; with B zero the adapters change nothing."""
    names = ("inputs", "rates", "output")

    def plain() -> GatedDeltaNet:
        config = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=8)
        return GatedDeltaNet(32, config, norm_eps=1e-6, rngs=nnx.Rngs(0), param_dtype=jnp.float32)

    check_from_outside(plain, names, view(positions_right_padded(jnp.array([5]), 5), None))


def test_separate_projections_are_the_joined_ones_in_another_order(layer: Layer) -> None:
    config = attrs.evolve(layer.config, projections="separate")
    keys, width, values = config.key_heads, config.key_head_dim, config.values_per_key * config.value_head_dim
    embed = layer.figures["x"].shape[-1]
    template = params.abstract(
        lambda: GatedDeltaNet(embed, config, norm_eps=0.05, rngs=nnx.Rngs(0), param_dtype=jnp.float32, chunk=16)
    )
    leaves = dict(layer.leaves)
    joined = leaves.pop("inputs.kernel").reshape(embed, keys, -1)  # each key head's query, key, values, gates
    *parts, gate = jnp.split(joined, np.cumsum([width, width, values]), axis=-1)
    rate, decay = jnp.split(leaves.pop("rates.kernel").reshape(embed, keys, -1), 2, axis=-1)
    leaves["inputs.kernel"] = jnp.concatenate([part.reshape(embed, -1) for part in parts], axis=-1)
    for name, part in (("output_gate", gate), ("rate", rate), ("decay", decay)):
        leaves[f"{name}.kernel"] = part.reshape(embed, -1)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {
        path: leaf.shape for path, leaf in template.variables.items()
    }
    x = jnp.asarray(layer.figures["x"])
    whole = positions_right_padded(jnp.full((len(x),), x.shape[1]), x.shape[1])
    separate = Layer(config, template, leaves, layer.figures)
    relative(jax.jit(lambda leaves, x: separate(leaves, x, whole, None)[0])(leaves, x), layer.figures["out"], 2e-6)
