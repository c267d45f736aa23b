"""Mamba-2 against stored figures of transformers; rows of every layout against rows of one sequence each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl.models import params
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.mamba2 import Mamba2Config
from nnxdsl.models.mamba2.layer import Mamba2, empty_state
from nnxdsl.models.mamba2.recurrence import Tokens, chunked_scan, step
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
    "inputs.kernel": "in_proj.weight",
    "conv.weight": "conv1d.weight",
    "conv.bias": "conv1d.bias",
    "a_log": "A_log",
    "dt_bias": "dt_bias",
    "skip": "D",
    "norm.scale": "norm.weight",
    "output.kernel": "out_proj.weight",
}


def load(name: str, chunk: int = 16) -> Layer:
    figures = dict(np.load(FIGURES / f"{name}.npz"))
    sizes = {key.removeprefix("config."): int(value) for key, value in figures.items() if key.startswith("config.")}
    limit = {"time_step_limit": tuple(figures["limit"].tolist())} if "limit" in figures else {}
    config = Mamba2Config(**sizes, **limit)
    embed = figures["x"].shape[-1]

    def build() -> Mamba2:
        return Mamba2(embed, config, norm_eps=0.05, rngs=nnx.Rngs(0), param_dtype=jnp.float32, chunk=chunk)

    # States are several times as large as what is read of them, and the norm has an epsilon of its own scale.
    return Layer(config, params.abstract(build), leaves_of(WEIGHTS, figures, "weight."), figures, tolerance=1e-5)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return load("mamba2_grouped")


def test_parameters_and_their_axes(layer: Layer) -> None:
    assert {path: (leaf.shape, leaf.axes) for path, leaf in layer.template.variables.items()} == {
        "a_log": ((4,), ("heads",)),
        "conv.bias": ((44,), ("conv",)),
        "conv.weight": ((44, 1, 4), ("conv", None, None)),
        "dt_bias": ((4,), ("heads",)),
        "inputs.kernel": ((20, 24 + 44 + 4), ("embed", "heads")),
        "norm.scale": ((24,), ("heads",)),
        "output.kernel": ((24, 20), ("heads", "embed")),
        "skip": ((4,), ("heads",)),
    }
    state = jax.eval_shape(lambda: empty_state(layer.config, 3, jnp.bfloat16))
    assert (state.conv_state.shape, state.conv_state.dtype) == ((3, 44, 3), jnp.bfloat16)
    assert (state.memory.shape, state.memory.dtype) == ((3, 4, 5, 6), jnp.float32)
    for fields, problem in (
        ({"num_heads": 3, "n_groups": 2}, "num_heads=3 is not a multiple of n_groups=2"),
        ({"num_heads": 0}, "num_heads must be above 0, got 0"),
        ({"num_heads": 2, "time_step_limit": (0.1, 0.1)}, "expected 0 <= least < largest"),
    ):
        with pytest.raises(ValueError, match=problem):
            Mamba2Config(**{"head_dim": 4, "state_size": 4, **fields})
    assert layer.config.divided(2) == Mamba2Config(num_heads=2, head_dim=6, state_size=5, n_groups=1)
    assert layer.config.divided(4) == layer.config


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        ("mamba2_grouped", 16),
        ("mamba2_limits", 16),
        pytest.param("mamba2_grouped", 64, marks=pytest.mark.slow),
        pytest.param("mamba2_limits", 64, marks=pytest.mark.slow),
    ],
)
def test_as_transformers_has_it(name: str, chunk: int) -> None:
    # Differences of sums of decays, which pass 100 in a chunk of 64, give factors their last digits.
    check_reference(load(name, chunk), WEIGHTS, out=1e-5, memory=1e-5, to_x=2e-5)


@pytest.mark.extended
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_the_prompt_of_a_pair_is_computed_once(layer: Layer, gradients: bool) -> None:
    check_pairs(layer, gradients)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_rows_of_pairs_side_by_side(layer: Layer, gradients: bool) -> None:
    check_packed_rows(layer, gradients)


@pytest.mark.slow
def test_where_nothing_is_known_of_the_row(layer: Layer) -> None:
    check_unknown_rows(layer)


@pytest.mark.slow
def test_token_by_token(layer: Layer) -> None:
    check_decoding(layer)


def test_decays_that_keep_all_or_nothing() -> None:
    """Chunks against token by token, with gradients: where nothing fades, where everything does."""
    rng = np.random.default_rng(0)
    order = Order(jnp.ones((1, 64), jnp.int32), None)

    def one_by_one(tokens: Tokens, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
        def one(memory: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
            out, memory = step(jax.tree.map(lambda part: part[:, None], token), jnp.ones(len(memory), bool), memory)
            return memory, out[:, 0]

        memory, out = jax.lax.scan(one, memory, jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), tokens))
        return jnp.moveaxis(out, 0, 1), memory

    @jax.jit
    def both(tokens: Tokens, memory: jax.Array) -> Any:
        actual = []
        for run in (lambda *inputs: chunked_scan(inputs[0], order, inputs[1], 16), one_by_one):
            out, back = jax.vjp(run, tokens, memory)
            actual.append((out, back(jax.tree.map(jnp.ones_like, out))))
        return actual

    c, b = (jnp.asarray(rng.normal(size=(1, 64, 1, 4)), jnp.float32) for _ in range(2))
    x = jnp.asarray(rng.normal(size=(1, 64, 1, 1, 3)), jnp.float32)
    memory = jnp.asarray(rng.normal(size=(1, 1, 1, 4, 3)), jnp.float32)
    for decay in (0.0, -200.0, -0.01):
        tokens = Tokens(c, b, x, jnp.full((1, 64, 1, 1), 0.5), jnp.full((1, 64, 1, 1), decay))
        mine, wanted = both(tokens, memory)
        jax.tree.map(lambda got, wanted: relative(got, wanted, 2e-5, 1.0), mine, wanted)


def test_the_backward_pass_keeps_what_the_linear_layers_gave(layer: Layer) -> None:
    """And nothing of what the convolution and the recurrence make of it, which is many times as large."""
    length = 1024
    row, places = rows.pair(512, 256), positions_right_padded(jnp.full((1,), length), length)
    leaves = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in layer.template.variables.items()}
    kept: list[jax.ShapeDtypeStruct] = []

    def trace(leaves: Leaves, x: jax.Array) -> None:
        _, back = jax.vjp(lambda leaves, x: layer(leaves, x, places, row)[0], leaves, x)
        kept.extend(jax.tree.leaves(back))

    jax.eval_shape(trace, leaves, jax.ShapeDtypeStruct((1, length, 20), jnp.float32))
    # x; inputs in two orders; outputs before and after the norm, and their gates.
    assert sum(leaf.size for leaf in kept) < length * (20 + 2 * 72 + 3 * 24) + 50_000


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
    """On both linear layers and nothing else; with B zero the adapters change nothing."""
    names = ("inputs", "output")

    def plain() -> Mamba2:
        config = Mamba2Config(num_heads=4, head_dim=8, state_size=8, n_groups=2)
        return Mamba2(32, config, norm_eps=1e-6, rngs=nnx.Rngs(0), param_dtype=jnp.float32)

    check_from_outside(plain, names, view(positions_right_padded(jnp.array([5]), 5), None))
