"""Mamba-2 against stored figures of transformers; rows of every layout against rows of one sequence each."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from nnxdsl.models import params
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.positions import positions_left_padded, positions_right_padded
from nnxdsl.models.config.mamba2 import Mamba2Config
from nnxdsl.models.mamba2.layer import Mamba2, empty_state
from nnxdsl.models.mamba2.recurrence import Tokens, chunked_scan, step
from nnxdsl.models.recurrent.order import Order
from nnxdsl.models.recurrent.rows import RecurrentState
from tests.models.recurrent import (
    FIGURES,
    GRADIENTS,
    Layer,
    Leaves,
    check_decoding,
    check_packed_rows,
    check_pairs,
    check_unknown_rows,
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


def ours(figures: dict[str, np.ndarray], prefix: str) -> Leaves:
    """Tensors of the Hub as our leaves: linear weights the other way round, all others as they are."""
    found = {path: figures[prefix + name] for path, name in WEIGHTS.items()}
    return {path: jnp.asarray(value.T if value.ndim == 2 else value) for path, value in found.items()}


def load(name: str, chunk: int = 16) -> Layer:
    figures = dict(np.load(FIGURES / f"{name}.npz"))
    sizes = {key.removeprefix("config."): int(value) for key, value in figures.items() if key.startswith("config.")}
    limit = {"time_step_limit": tuple(figures["limit"].tolist())} if "limit" in figures else {}
    config = Mamba2Config(**sizes, **limit)
    embed = figures["x"].shape[-1]

    def build() -> Mamba2:
        return Mamba2(embed, config, norm_eps=0.05, rngs=nnx.Rngs(0), param_dtype=jnp.float32, chunk=chunk)

    # States are several times as large as what is read of them, and the norm has an epsilon of its own scale.
    return Layer(config, params.abstract(build), ours(figures, "weight."), figures, tolerance=1e-5)


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
    layer = load(name, chunk)
    x, c, lengths = (jnp.asarray(layer.figures[key]) for key in ("x", "c", "lengths"))
    rows_, length = x.shape[:2]
    whole, short = positions_right_padded(jnp.full((rows_,), length), length), positions_left_padded(lengths, length)

    @jax.jit
    def run(leaves: Leaves, x: jax.Array) -> tuple[Any, ...]:
        def total(leaves: Leaves, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, RecurrentState]]:
            out, state = layer(leaves, x, whole, rows.sequence(length))
            return jnp.sum(out * c), (out, state)

        (_, (out, state)), to = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(leaves, x)
        return out, state.memory, *to, layer(leaves, x, short, None)[0]

    out, memory, to_weights, to_x, padded = run(layer.leaves, x)
    # Differences of sums of decays, which pass 100 in a chunk of 64, give factors their last digits.
    relative(out, layer.figures["out"], 1e-5)
    relative(memory, layer.figures["memory"], 1e-5)
    relative(to_x, layer.figures["to_x"], 2e-5)
    for path, wanted in ours(layer.figures, "to.").items():
        relative(to_weights[path], wanted, 2e-5)  # sums over all tokens, some of which cancel
    real = np.asarray(short.segment_ids)[..., None] > 0
    assert not real.all()
    relative(np.where(real, padded, 0), layer.figures["padded"], 1e-5)
    assert np.isfinite(np.asarray(padded)).all()


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
        found = []
        for run in (lambda *given: chunked_scan(given[0], order, given[1], 16), one_by_one):
            out, back = jax.vjp(run, tokens, memory)
            found.append((out, back(jax.tree.map(jnp.ones_like, out))))
        return found

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
    rule = {"module_path": "|".join(names), "weight_qtype": "nf4", "tile_size": 16}
    given = jnp.ones((1, 5, 32)), view(positions_right_padded(jnp.array([5]), 5), None), None

    def plain() -> Mamba2:
        config = Mamba2Config(num_heads=4, head_dim=8, state_size=8, n_groups=2)
        return Mamba2(32, config, norm_eps=1e-6, rngs=nnx.Rngs(0), param_dtype=jnp.float32)

    def tuned() -> Any:
        provider = qwix.LoraProvider([qwix.LoraRule(**rule, rank=2, alpha=2.0)])
        return qwix.apply_lora_to_model(plain(), provider, *given, rngs=nnx.Rngs(1))

    def base() -> Any:
        return qwix.quantize_model(plain(), qwix.PtqProvider([qwix.QuantizationRule(**rule)]), *given)

    policy, frozen = params.abstract(tuned), params.abstract(base)
    found = [re.fullmatch(r"(\w+)\.kernel_lora_[ab]", path) for path in policy.variables]
    assert {match[1] for match in found if match} == set(names)
    assert sum(path.endswith("qvalue") for path in policy.variables) == len(names)

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        leaves = params.flatten(base())
        adapters = {
            path: jnp.full(leaf.shape, float(path.endswith("_a")), leaf.dtype)
            for path, leaf in policy.variables.items()
            if "_lora_" in path
        }
        one: Any = policy.merge(leaves | adapters)
        other: Any = frozen.merge(leaves)
        return one(x, *given[1:])[0], other(x, *given[1:])[0]

    mine, wanted = run(jax.random.normal(jax.random.key(0), (1, 5, 32)))
    assert float(jnp.abs(wanted).max()) > 0.1
    np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-6)
