"""What a layer keeps for its backward pass: each wide array once, and nothing that is cheap to compute again."""

from __future__ import annotations

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl.models.attention.context import context
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, sequence
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import LayerGroup
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.layers.rope import apply_rotary, rope_tables
from nnxdsl.models.remat import from_inputs

ROWS, LENGTH = 2, 24
MLP = 80
GEMMA = GEMMA3["270m"].with_fields({"num_heads": 3, "head_dim": 16, "mlp.dim": MLP, "embed_dim": 56})
LLAMA = LLAMA3["1b"].with_fields({"num_heads": 3, "num_kv_heads": 1, "head_dim": 16, "mlp.dim": MLP, "embed_dim": 56})


def kept(config: DecoderConfig) -> Counter[int]:
    """The last axis of all that the derivative of one layer holds on to by its weights and its input."""
    period = LayerGroup(config, config.layers.pattern[:1], rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    graphdef, state = nnx.split(period)
    result: list[jax.Array] = []

    def trace(state: nnx.State, x: jax.Array) -> None:
        places = positions_right_padded(jnp.full((ROWS,), LENGTH, jnp.int32), LENGTH)
        shared = context(config, places, None, AttentionMethod("chunked", sequence(LENGTH)))
        _, back = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x, shared)[0], state, x)
        fields = {id(leaf) for leaf in jax.tree.leaves((state, shared))}
        result.extend({id(leaf): leaf for leaf in jax.tree.leaves(back) if id(leaf) not in fields}.values())

    jax.eval_shape(trace, state, jax.ShapeDtypeStruct((ROWS, LENGTH, config.embed_dim), jnp.float32))
    wide = [leaf for leaf in result if leaf.size >= ROWS * LENGTH * 8]  # without what is one number a token
    return Counter(leaf.shape[-1] for leaf in wide)


@pytest.mark.parametrize(
    ("config", "of_stream"),
    [
        # The stream before both parts, what both norms before them make of it, and what the norms after them are given.
        (GEMMA, 6),
        (LLAMA, 4),
    ],
    ids=["gemma3", "llama3"],
)
def test_a_layer_keeps_each_array_once(config: DecoderConfig, of_stream: int) -> None:
    actual = kept(config)
    assert actual[MLP] == 3  # the products of gate and up, and what is given to down
    assert actual[config.embed_dim] == of_stream
    # Queries and keys before their norms where they have some; queries, keys and values; what attention mixed.
    heads = 5 if config.attention.query_key_norm == "head" else 3
    assert actual[config.head_dim] == heads
    assert actual[config.num_heads * config.head_dim] == 1
    assert sum(actual.values()) == 3 + of_stream + heads + 1


def test_positions_turn_gradients_back() -> None:
    config, draw = GEMMA, jax.random.split(jax.random.key(0), 2)
    x, toward = (jax.random.normal(key, (ROWS, LENGTH, 3, config.head_dim)) for key in draw)
    tables = rope_tables(jnp.tile(jnp.arange(LENGTH), (ROWS, 1)), config.head_dim, config.rope_global)
    _, back = jax.vjp(lambda x: apply_rotary(x, tables), x)

    def halves(x: jax.Array) -> np.ndarray:
        return np.asarray(x[..., : config.head_dim // 2] + 1j * x[..., config.head_dim // 2 :])

    angle = np.exp(1j * np.arctan2(*(np.asarray(table, np.float64) for table in tables)))[:, :, None]
    np.testing.assert_allclose(halves(apply_rotary(x, tables)), halves(x) * angle, atol=1e-6)
    np.testing.assert_allclose(halves(back(toward)[0]), halves(toward) / angle, atol=1e-6)


def test_what_is_computed_again_has_the_same_gradients() -> None:
    def function(scale: float, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tanh(scale * x) * jnp.sum(jnp.exp(y), axis=0)

    x, y = jax.random.normal(jax.random.key(1), (2, 5, 7))
    plain, again = partial(function, 0.3), from_inputs(partial(function, 0.3))
    np.testing.assert_array_equal(again(x, y), plain(x, y))
    ones = jnp.ones_like(x)
    for got, want in zip(jax.vjp(again, x, y)[1](ones), jax.vjp(plain, x, y)[1](ones), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
