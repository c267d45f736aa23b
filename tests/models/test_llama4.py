"""What Llama 4 is made of: chunks, layers without rotary positions, queries by position, experts that scale inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.errors import WeightsError
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.blockwise import attend_in_blocks
from nnxdsl.models.attention.dot_product import dot_product_attention
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, RowLayout
from nnxdsl.models.attention.self_attention import self_attention
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.attention import QueryTemperature
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.rope import Llama3RopeScaling, Rope
from nnxdsl.models.families.llama4 import LLAMA4
from nnxdsl.models.families.registry import from_hf, to_hf
from nnxdsl.models.layers.rope import rope_tables
from nnxdsl.program.batches.base import attended_pairs
from tests.models.stored import FAMILIES, Leaves, compared, read

WITHOUT = 1e-2
"""Of the largest logit: what leaving an ingredient out changes at least; the tests of families allow 1e-5."""


@pytest.fixture(scope="module")
def stored() -> tuple[DecoderConfig, Leaves]:
    return read("llama4")


def difference(config: DecoderConfig, leaves: Leaves) -> float:
    """How far logits are from those of transformers for llama4, relative to the largest."""
    return compared("llama4", config)(leaves)


def with_experts(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    assert config.moe is not None
    return attrs.evolve(config, feed_forward=attrs.evolve(config.moe, **changes))


def with_temperature(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    assert config.attention.query_temperature is not None
    temperature = attrs.evolve(config.attention.query_temperature, **changes)
    return config.with_fields({"attention.query_temperature": temperature})


LEFT_OUT = {
    "chunks": lambda config: attrs.evolve(config, window_kind="sliding"),
    "layers without positions": lambda config: config.with_fields(
        {"layers.pattern": tuple("global" if kind == "nope" else kind for kind in config.layers.pattern)}
    ),
    "factor of queries": lambda config: config.with_fields({"attention.query_temperature": None}),
    "factor in those layers alone": lambda config: with_temperature(config, layers="all"),
    "its offset": lambda config: with_temperature(config, offset=0),
    "norm after the rotation": lambda config: config.with_fields({"attention.query_key_norm": "none"}),
    "pairs of neighbours": lambda config: attrs.evolve(
        config, rope_global=attrs.evolve(config.rope_global, interleaved=False)
    ),
    "scaled wavelengths": lambda config: attrs.evolve(config, rope_global=Rope(theta=500.0, interleaved=True)),
    "scaled inputs": lambda config: with_experts(config, scales_input=False),
    "sigmoid scores": lambda config: with_experts(config, scoring="softmax"),
    "scores that need not sum to one": lambda config: with_experts(config, norm_topk_prob=True),
}


@pytest.mark.extended
def test_all_ingredients_together(stored: tuple[DecoderConfig, Leaves]) -> None:
    assert difference(*stored) == pytest.approx(0, abs=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_each_ingredient_counts(stored: tuple[DecoderConfig, Leaves], left_out: str) -> None:
    config, leaves = stored
    assert difference(LEFT_OUT[left_out](config), leaves) > WITHOUT


def test_the_shared_expert_counts(stored: tuple[DecoderConfig, Leaves]) -> None:
    config, leaves = stored
    zeros = {path: jnp.zeros_like(leaf) for path, leaf in leaves.items() if path.endswith("shared.down.kernel")}
    assert zeros
    assert difference(config, leaves | zeros) > WITHOUT


def test_tokens_attend_within_their_chunk() -> None:
    positions = positions_right_padded(jnp.asarray([10]), 12)
    actual = np.asarray(attention_mask(positions, positions, 4, is_chunked=True))[0]
    wanted = [[key <= query < 10 and key // 4 == query // 4 for key in range(12)] for query in range(10)]
    np.testing.assert_array_equal(actual[:10], wanted)


ROWS = {
    "sequence": (rows.sequence(23), positions_right_padded(jnp.asarray([23, 17]), 23)),
    "packed": (
        rows.packed(14),
        TokenPositions(
            jnp.asarray([[*range(9), *range(5)], [*range(6), *range(8)]]),
            jnp.asarray([[1] * 9 + [2] * 5, [1] * 6 + [2] * 7 + [0]]),
            jnp.zeros((2, 14), jnp.int32),
        ),
    ),
    # A prompt of 5 tokens and two answers that go on from it, in the chunk that the prompt ends in.
    "pair": (
        rows.pair(5, 6),
        TokenPositions(
            jnp.asarray([[*range(5), *range(5, 11), *range(5, 11)]] * 2),
            jnp.ones((2, 17), jnp.int32),
            jnp.asarray([[0] * 5 + [1] * 6 + [2] * 6] * 2),
        ),
    ),
}


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", ROWS)
def test_blocks_of_chunks_are_the_dense_product(name: str) -> None:
    row, positions = ROWS[name]
    draw = np.random.default_rng(0)
    shapes = [(2, row.size, heads, 8) for heads in (4, 2, 2, 4)]
    query, key, value, toward = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes)
    real = (positions.segment_ids > 0)[..., None, None]
    mask = attention_mask(positions, positions, 4, is_chunked=True)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.where(real, dot_product_attention(q, k, v, mask, 0.3), 0)

    def blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        actual = attend_in_blocks(q, k, v, positions, row, window=4, is_chunked=True, scale=0.3, queries=3)
        return jnp.where(real, actual, 0)

    def both(function: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        @jax.jit
        def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            value, back = jax.vjp(function, *inputs)
            return value, *back(toward)

        return run(query, key, value)

    for ours, expected in zip(both(blocks), both(dense), strict=True):
        np.testing.assert_allclose(ours, expected, atol=3e-6)


@pytest.mark.parametrize("kernel", ["cudnn", "splash"])
def test_fused_kernels_have_no_chunks(kernel: Any) -> None:
    heads, positions = jnp.zeros((1, 8, 2, 8)), positions_right_padded(jnp.asarray([8]), 8)
    method = AttentionMethod(kernel, RowLayout((8,), 8), window=4, is_chunked=True)
    nothing = jnp.zeros((1, 8, 0))
    with pytest.raises(ValueError, match=f"{kernel} attention has no chunks"):
        self_attention(heads, heads, heads, View(method, positions, None, (nothing, nothing)), None, scale=1.0)


def test_pairs_of_tokens_in_chunks() -> None:
    for tokens in range(14):
        wanted = sum(query // 4 == key // 4 for query in range(tokens) for key in range(query + 1))
        assert attended_pairs(np.asarray([tokens]), 4, is_chunked=True).tolist() == [wanted]


def test_wavelengths_of_scout() -> None:
    """Equal factors are a step between two frequencies; wavelengths are those of transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = LLAMA4["scout-17b-16e"]
    assert isinstance(config.rope_global.scaling, Llama3RopeScaling)
    theirs = transformers.Llama4TextConfig(**{
        key: value for key, value in to_hf(config).items() if key in ("rope_theta", "rope_scaling", "head_dim")
    })  # fmt: skip
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    frequency, factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    assert factor == 1.0
    sin, cos = rope_tables(jnp.asarray([[1]]), config.head_dim, config.rope_global)
    np.testing.assert_allclose(sin[0, 0], np.sin(frequency.numpy()), atol=1e-6)
    np.testing.assert_allclose(cos[0, 0], np.cos(frequency.numpy()), atol=1e-6)
    assert len(np.unique(np.round(frequency.numpy() * 500_000.0 ** (np.arange(64) / 64), 4))) == 2  # 1 and 1/16


def fields() -> dict[str, Any]:
    return json.loads((FAMILIES / "llama4" / "config.json").read_text())


def test_published_spellings() -> None:
    saved = fields()
    config = from_hf(saved)
    assert config.layers.kinds == ("local", "local", "nope") * 2
    assert config.attention.query_temperature == QueryTemperature(beta=0.3, length=8, offset=1, layers="nope")
    short = {name: value for name, value in saved.items() if name not in ("moe_layers", "layer_types")}
    short |= {"no_rope_layers": [], "attn_temperature_tuning": 4, "interleave_moe_layer_step": 2}
    assert from_hf({"model_type": "llama4", "text_config": {**short, "no_rope_layer_interval": 3}}) == config
    assert from_hf({**saved, "attn_temperature_tuning": False}).attention.query_temperature is None
    kinds = ["full_attention", *saved["layer_types"][1:]]
    assert from_hf({**saved, "layer_types": kinds}).layers.kinds[0] == "global"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_layers": []}, "moe_layers: expected at least one layer with experts"),
        ({"moe_layers": [6]}, "moe_layers: expected a list of layers from 0 to 5, got"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers: expected 0 or 1 for each of 6 layers, got"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types: expected 6 of"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types: layer 2 has chunks, but no rotary positions"),
        ({"attention_chunk_size": None}, "attention_chunk_size: expected an integer from 1 to"),
        ({"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ({"floor_scale": 2.5}, "floor_scale: expected a whole number, got 2.5"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        from_hf({**fields(), **change})


def test_other_rotations_are_no_llama_4() -> None:
    config = LLAMA4["tiny"]
    other = attrs.evolve(config, rope_global=attrs.evolve(config.rope_global, interleaved=False))
    with pytest.raises(WeightsError, match="Llama 4 has rope_global="):
        to_hf(other)
