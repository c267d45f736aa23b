"""Layers that share the selection of an earlier one: which they are, what they compute, what is written; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models import params
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.indexer import INDEXER_STATS
from nnxdsl.models.attention.kv_cache import init_cache
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.glm5 import GLM5_SIZES
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.families.registry import from_hf, to_hf

CHECKPOINT = Path(__file__).parent.parent / "reference" / "families" / "glm_moe_dsa_shared"
FIELDS = hf.read_fields(CHECKPOINT)
SPELLINGS = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
TOLERANCE = 1e-5


def file_of(layers: int = 11, dense: list[bool] | None = None, **fields: Any) -> dict[str, Any]:
    """The stored `config.json` with other layers, without what it has of its indexers."""
    entries = {
        name: value for name, value in FIELDS.items() if name not in (*SPELLINGS, "layer_types", "mlp_layer_types")
    }
    types = None if dense is None else ["dense" if is_dense else "sparse" for is_dense in dense]
    return {**entries, "num_hidden_layers": layers, "mlp_layer_types": types, **fields}


def types_of(config: DecoderConfig) -> list[str]:
    return ["shared" if kind == "shared_index" else "full" for kind in config.layers.kinds]


def loaded() -> tuple[DecoderConfig, params.AbstractModel, dict[str, jax.Array]]:
    reader = hf.HubReader(CHECKPOINT)
    template = params.abstract(lambda: Decoder(reader.config, rngs=nnx.Rngs(0)))
    return reader.config, template, {path: jnp.asarray(reader.leaf(path)) for path in template.variables}


@pytest.mark.extended
@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 12).flatmap(
        lambda count: st.tuples(
            st.lists(st.booleans(), min_size=count - 1, max_size=count - 1),
            st.lists(st.booleans(), min_size=count, max_size=count).filter(lambda dense: not all(dense)),
        )
    )
)
@example(([True, True, False] * 3, [True] + [False] * 9))
@example(([True, True, True], [False] * 4))
@example(([False, True, False, False], [False] * 3 + [True] * 2))
def test_every_list_of_layers_is_what_is_built_and_written(lists: tuple[list[bool], list[bool]]) -> None:
    later, dense = lists
    types = ["full", *("shared" if is_shared else "full" for is_shared in later)]
    config = from_hf(file_of(len(types), dense, indexer_types=types))
    assert (types_of(config), list(config.dense)) == (types, dense)
    groups = (config.layers.prefix, config.layers.pattern, config.layers.suffix)
    assert all(group[0] == "global" for group in groups if group)
    names = {name for source in tensor_sources(config, "glm_moe_dsa").values() for name in source.names}
    for layer, (kind, is_dense) in enumerate(zip(types, dense, strict=True)):
        assert (f"layers.{layer}.self_attn.indexer.wk.weight" in names) == (kind == "full")
        assert (f"layers.{layer}.mlp.up_proj.weight" in names) == is_dense
        assert config.layers.path(layer)[0] in {path.partition(".attention")[0] for path in tensor_sources(config)}
    written = to_hf(config)
    assert from_hf(written) == config
    assert written.get("indexer_types", ["full"] * len(types)) == types


def test_the_fewest_layers_are_compiled() -> None:
    def parts(layers: int, every: int, first: int, dense: int) -> tuple[int, int, int, int]:
        fields: dict[str, Any] = {
            "index_topk_freq": every,
            "index_skip_topk_offset": first,
            "first_k_dense_replace": dense,
        }
        config = from_hf(file_of(layers, **fields))
        return len(config.layers.prefix), config.layers.period, config.layers.periods, len(config.layers.suffix)

    assert parts(78, 4, 3, 3) == (6, 4, 18, 0)  # GLM-5.2
    assert parts(11, 3, 1, 1) == (3, 3, 2, 2)
    assert parts(11, 3, 2, 1) == (1, 3, 3, 1)
    assert parts(5, 1, 2, 2) == (2, 1, 3, 0)


def test_all_spellings_are_read_as_transformers_reads_them() -> None:
    stored = hf.read_config(CHECKPOINT)  # where transformers has written the types that follow from the numbers
    types = FIELDS["indexer_types"]
    assert types_of(stored) == types
    assert types.count("full") == 4
    letters = "".join(kind[0].upper() for kind in types)
    spellings: tuple[dict[str, Any], ...] = (
        {"indexer_types": types},
        {"index_topk_pattern": letters},
        {"index_topk_pattern": types},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
        # The first of them decides.
        {"indexer_types": types, "index_topk_pattern": "F" * 11, "index_topk_freq": 2},
        {"indexer_types": None, "index_topk_pattern": letters, "index_topk_freq": 2},
    )
    for fields in spellings:
        assert from_hf(file_of(**fields)) == stored
    assert types_of(from_hf(file_of(6, index_topk_freq=2))) == ["full", "full", "shared", "full", "shared", "full"]
    assert types_of(from_hf(file_of(3, index_topk_freq=0))) == ["full"] * 3
    written = to_hf(stored)
    assert (written["indexer_types"], written["index_topk_pattern"]) == (types, letters)
    assert not set(SPELLINGS) & to_hf(from_hf(file_of())).keys()


def test_the_published_file_of_glm_5_2() -> None:
    fields = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "head_dim": 192,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "initializer_range": 0.02,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3,
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "pretraining_tp": 1,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": 256,
        "vocab_size": 154880,
    }
    assert from_hf(fields) == GLM5_SIZES["5.2-744b"]
    by_numbers = {name: value for name, value in fields.items() if name != "indexer_types"}
    assert from_hf(by_numbers) == GLM5_SIZES["5.2-744b"]
    assert types_of(GLM5_SIZES["5.2-744b"]) == fields["indexer_types"]


@pytest.mark.slow
def test_blocks_of_queries_share_the_selection_as_one_product() -> None:
    config, template, leaves = loaded()
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (2, 17))
    places = positions_right_padded(jnp.array([17, 11]), 17)
    real = (np.arange(17)[None] < np.array([17, 11])[:, None])[..., None]

    def run(method: AttentionMethod) -> Any:
        def loss(leaves: dict[str, jax.Array]) -> Any:
            model: Any = template.merge(leaves)
            with INDEXER_STATS.recording(True):
                out = model(jnp.asarray(tokens), places, dtype=jnp.float32, method=method)
            total = jnp.sum(jnp.square(out.hidden * real))
            return total + out.indexer_stats.divergence, (out.indexer_stats, out.router_stats)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(leaves)

    ((one, (stats, routing)), dense), ((other, (blocks, _)), chunked) = (
        run(method) for method in (AttentionMethod(), AttentionMethod("chunked", rows.sequence(17), queries=5))
    )
    assert float(stats.tokens) == float(blocks.tokens) == 28 * 4  # of the layers that have an indexer
    assert float(routing.tokens) == 28 * 10  # of the layers that have experts, before the stack, too
    np.testing.assert_allclose(other, one, rtol=TOLERANCE)
    np.testing.assert_allclose(blocks.divergence, stats.divergence, rtol=TOLERANCE)
    for path, wanted in dense.items():
        scale = float(jnp.abs(wanted).max())
        assert scale > 0 or "correction" in path or path == "lm_head.kernel", path
        np.testing.assert_allclose(chunked[path], wanted, atol=3 * TOLERANCE * scale, err_msg=path)


def test_only_layers_that_select_cache_the_keys_of_an_indexer() -> None:
    config = hf.read_config(CHECKPOINT)
    cache = init_cache(config, 3, 10, jnp.float32)
    assert ["full" if hasattr(kept, "index_key") else "shared" for kept in cache.layers] == FIELDS["indexer_types"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["full"] * 4}, "indexer_types: expected 11 of 'full' and 'shared', got"),
        ({"indexer_types": ["full"] * 10 + ["both"]}, "indexer_types: expected 11 of 'full' and 'shared', got"),
        ({"indexer_types": 11}, "indexer_types: expected 11 of 'full' and 'shared', got 11"),
        ({"indexer_types": ["shared"] * 11}, "indexer_types: expected 'full' for the first layer, which has no"),
        ({"index_topk_pattern": "SFFFFFFFFFF"}, "index_topk_pattern: expected 'full' for the first layer"),
        ({"index_topk_pattern": "FFFSX"}, "index_topk_pattern: expected 11 of 'full' and 'shared', got"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 0}, "index_topk_freq: expected 'full' for the first layer"),
        ({"index_topk_freq": "4"}, "index_topk_freq: expected an integer from 0 to"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype: only 'float32' is implemented"),
    ],
)
def test_files_that_are_not_understood_say_so(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        from_hf(file_of(**fields))


def test_decoders_that_cannot_be_say_so() -> None:
    tiny = GLM5_SIZES["tiny"]
    groups = "pattern: expected that prefix, period and suffix begin with a global layer"
    for fields in (
        {"layers.pattern": ("shared_index", "global")},
        {"layers.lead_pattern": ("shared_index",), "layers.pattern": ("global", "shared_index")},
        {"layers.tail_pattern": ("shared_index",), "layers.pattern": ("global", "global")},
    ):
        with pytest.raises(ValueError, match=groups):
            tiny.with_fields(fields)
    with pytest.raises(ValueError, match="lead_pattern: expected a kind for each of dense_layers"):
        tiny.with_fields({"layers.dense_layers": 2, "layers.lead_pattern": ("global",)})
    with pytest.raises(ValueError, match="lead_pattern: expected at most 4 layers"):
        tiny.with_fields({"layers.lead_pattern": ("global",) * 5})
    with pytest.raises(ValueError, match="pattern: shared_index layers need mla, and global layers alone beside"):
        LLAMA3["tiny"].with_fields({"layers.pattern": ("global", "shared_index")})
    # No other family has such layers.
    halves = hf.read_config(CHECKPOINT)
    assert halves.mla is not None
    assert halves.mla.indexer is not None
    indexer = attrs.evolve(halves.mla.indexer, rope_interleave=False)
    with pytest.raises(WeightsError, match=r"lead_pattern|rope_interleave"):
        to_hf(attrs.evolve(halves, mla=attrs.evolve(halves.mla, indexer=indexer)))
