"""Which tokens an indexer selects: the largest scores among those the mask allows, in every layout and kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.indexer import INDEXER_STATS, largest
from nnxdsl.models.attention.kv_cache import init_cache
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.indexer import IndexerConfig
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.families.deepseek_v32 import DEEPSEEK_V32
from nnxdsl.models.families.registry import from_hf, to_hf
from nnxdsl.models.layers.norm import LayerNorm

CHECKPOINT = Path(__file__).parent.parent / "reference" / "families" / "deepseek_v32"
TOLERANCE = 1e-5


def with_indexer(config: DecoderConfig, **fields: Any) -> DecoderConfig:
    assert config.mla is not None
    assert config.mla.indexer is not None
    return attrs.evolve(config, mla=attrs.evolve(config.mla, indexer=attrs.evolve(config.mla.indexer, **fields)))


@pytest.fixture(scope="module")
def config() -> DecoderConfig:
    return hf.read_config(CHECKPOINT)


@pytest.fixture(scope="module")
def leaves(config: DecoderConfig) -> dict[str, jax.Array]:
    reader = hf.HubReader(CHECKPOINT)
    return {path: jnp.asarray(reader.leaf(path)) for path in abstract_decoder(config).variables}


def hidden(
    config: DecoderConfig, leaves: dict[str, jax.Array], tokens: Any, places: TokenPositions, **kwargs: Any
) -> Any:
    model: Any = abstract_decoder(config).merge(leaves)
    return model(jnp.asarray(tokens), places, dtype=jnp.float32, **kwargs)


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float32, (2, 3, 7), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0])),
    arrays(np.bool_, (2, 3, 7)),
    st.integers(1, 8),
)
def test_the_largest_scores_are_chosen_among_equal_ones_the_first(
    scores: np.ndarray, allowed: np.ndarray, count: int
) -> None:
    actual = np.asarray(largest(jnp.asarray(scores), jnp.asarray(allowed), count))
    for ours, mask, chosen in zip(scores.reshape(-1, 7), allowed.reshape(-1, 7), actual.reshape(-1, 7), strict=True):
        order = sorted(np.flatnonzero(mask), key=lambda slot: (-ours[slot], slot))
        wanted = order if count >= 7 else order[:count]
        assert set(np.flatnonzero(chosen)) == set(wanted)


@pytest.mark.extended
def test_rows_of_no_more_tokens_than_are_selected_have_dense_attention(
    config: DecoderConfig, leaves: dict[str, jax.Array]
) -> None:
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12))
    places = positions_right_padded(jnp.array([12, 7]), 12)
    dense = hidden(with_indexer(config, selects=False), leaves, tokens, places).hidden
    for topk in (12, 13):  # of 12 slots all are selected, whatever the scores
        actual = hidden(with_indexer(config, topk=topk), leaves, tokens, places).hidden
        np.testing.assert_array_equal(actual, dense)
    # With a slot of padding more than are selected, scores are computed and all tokens of a row are among the largest.
    longer = np.pad(tokens, ((0, 0), (0, 3)))
    padded = positions_right_padded(jnp.array([12, 7]), 15)
    actual = hidden(with_indexer(config, topk=12), leaves, longer, padded).hidden
    real = np.arange(12)[None] < np.array([12, 7])[:, None]
    np.testing.assert_allclose(actual[:, :12][real], dense[real], atol=TOLERANCE * float(jnp.abs(dense).max()))
    sparse = hidden(config, leaves, tokens, places).hidden
    assert float(jnp.abs(sparse - dense).max()) > 0.1  # else nothing is tested here


@pytest.mark.extended
@pytest.mark.parametrize("kernel", [pytest.param("dense", marks=pytest.mark.slow), "chunked"])
def test_branches_select_as_separate_sequences(
    config: DecoderConfig, leaves: dict[str, jax.Array], kernel: rows.Kernel
) -> None:
    draw = np.random.default_rng(1)
    prompt, first, second = (draw.integers(0, config.vocab_size, n) for n in (7, 9, 6))
    row = rows.pair(8, 9)  # a prompt of 8 slots, padded on its left
    tokens = np.concatenate([[0], prompt, first, second, [0, 0, 0]])[None]
    position = np.concatenate([[0], np.arange(7), np.arange(7, 16), np.arange(7, 13), [0, 0, 0]])[None]
    segment = np.array([[0] + [1] * 22 + [0] * 3])
    branch = np.array([[0] * 8 + [1] * 9 + [2] * 9])
    places = TokenPositions(*(jnp.asarray(part, jnp.int32) for part in (position, segment, branch)))
    method = AttentionMethod() if kernel == "dense" else AttentionMethod(kernel, row, queries=5)
    both = hidden(config, leaves, tokens, places, method=method).hidden[0]
    for ours, slots in ((first, slice(8, 17)), (second, slice(17, 23))):
        alone = np.concatenate([prompt, ours])[None]
        places = positions_right_padded(jnp.array([alone.shape[1]]), alone.shape[1])
        wanted = hidden(config, leaves, alone, places).hidden[0]
        actual = jnp.concatenate([both[1:8], both[slots]])
        np.testing.assert_allclose(actual, wanted, atol=TOLERANCE * float(jnp.abs(wanted).max()))


@pytest.mark.extended
def test_blocks_of_queries_select_as_one_product(config: DecoderConfig, leaves: dict[str, jax.Array]) -> None:
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (2, 17))
    places = positions_right_padded(jnp.array([17, 11]), 17)
    real = (np.arange(17)[None] < np.array([17, 11])[:, None])[..., None]

    def run(method: AttentionMethod) -> Any:
        def loss(leaves: dict[str, jax.Array]) -> Any:
            with INDEXER_STATS.recording(True):
                out = hidden(config, leaves, tokens, places, method=method)
            assert out.indexer_stats is not None
            return jnp.sum(jnp.square(out.hidden * real)) + out.indexer_stats.divergence, out.indexer_stats

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(leaves)

    ((one, stats), dense), ((other, blocks), chunked) = (
        run(method) for method in (AttentionMethod(), AttentionMethod("chunked", rows.sequence(17), queries=5))
    )
    assert float(stats.tokens) == float(blocks.tokens) == 28 * config.layers.num_layers
    np.testing.assert_allclose(other, one, rtol=TOLERANCE)
    np.testing.assert_allclose(blocks.divergence, stats.divergence, rtol=TOLERANCE)
    for path, wanted in dense.items():
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(chunked[path], wanted, atol=3 * TOLERANCE * scale, err_msg=path)


def test_caches_hold_the_keys_of_indexers(config: DecoderConfig) -> None:
    cache = init_cache(config, 3, 10, jnp.float32)
    assert [kept.index_key.shape for kept in cache.layers] == [(3, 1, 10, 10)] * config.layers.num_layers
    plain = init_cache(attrs.evolve(config, mla=attrs.evolve(config.mla, indexer=None)), 3, 10, jnp.float32)
    assert len(jax.tree.leaves(plain)) < len(jax.tree.leaves(cache))


def test_layer_norm_is_that_of_the_paper() -> None:
    draw = np.random.default_rng(3)
    norm = LayerNorm(6, axis="norm", eps=1e-3, param_dtype=jnp.float32)
    scale, bias, x = draw.normal(size=6), draw.normal(size=6), draw.normal(size=(4, 6)) + 2
    norm.scale[...], norm.bias[...] = jnp.asarray(scale, jnp.float32), jnp.asarray(bias, jnp.float32)
    wanted = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * scale + bias
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), wanted, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_says_so() -> None:
    widths = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    indexer = IndexerConfig(num_heads=2, head_dim=2, topk=3)
    with pytest.raises(ValueError, match=r"indexer.head_dim=2 is below qk_rope_head_dim=4"):
        MLAConfig(q_lora_rank=4, indexer=indexer, **widths)
    with pytest.raises(ValueError, match=r"indexer: reads compressed queries, which need a q_lora_rank"):
        MLAConfig(indexer=indexer, **widths)
    with pytest.raises(ValueError, match=r"indexer.topk must be above 0, got 0"):
        IndexerConfig(num_heads=2, head_dim=2, topk=0)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave: expected true"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave: expected false"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave: only true is implemented"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 5}, "layer_types: expected 'indexed_attention'"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk: expected an integer above 0"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank: expected an integer above 0"),
        ("deepseek_v32", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types: expected 5 of"),
    ],
)
def test_files_that_are_not_understood_say_so(kind: str, fields: dict[str, Any], message: str) -> None:
    stored = hf.read_fields(CHECKPOINT.with_name(kind))
    assert from_hf(stored)  # without the field it is
    with pytest.raises(Exception, match=message):
        from_hf({**stored, **fields})


def test_decoders_with_and_without_indexers_are_of_different_families() -> None:
    sparse = DEEPSEEK_V32["tiny"]
    assert to_hf(sparse)["model_type"] == "deepseek_v32"
    assert to_hf(attrs.evolve(sparse, mla=attrs.evolve(sparse.mla, indexer=None)))["model_type"] == "deepseek_v3"
    assert to_hf(with_indexer(sparse, rope_interleave=True))["model_type"] == "glm_moe_dsa"
    dense = with_indexer(sparse, selects=False)  # a stage of training, which files do not tell of
    assert from_hf(to_hf(dense)) == sparse
