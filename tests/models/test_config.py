"""Sizes against the published ones, and every spelling of config.json."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl.errors import WeightsError
from nnxdsl.models import params
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import local_then_global
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.registry import FAMILIES, from_hf, to_hf

# config.json of google/gemma-3-1b-it, as transformers 4.50 wrote it.
ONE_BILLION: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
# The text part of google/gemma-3-4b-it: what equals transformers' defaults is left out.
FOUR_BILLION: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


# 1b, 4b, 12b and 27b as KerasHub states them for its text models, whose vocabulary has 64 rows fewer from 4b on.
@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("270m", 268_098_176),
        ("1b", 999_885_952),
        ("4b", 3_880_099_328 + 64 * 2560),
        ("12b", 11_765_788_416 + 64 * 3840),
        ("27b", 27_009_002_240 + 64 * 5376),
    ],
)
def test_published_parameter_counts(size: str, parameters: int) -> None:
    template = params.abstract(lambda: Decoder(GEMMA3[size], rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in template.variables.values()) == parameters


def test_published_files() -> None:
    assert from_hf(ONE_BILLION) == GEMMA3["1b"]
    assert from_hf(FOUR_BILLION) == GEMMA3["4b"]


def test_spelling_of_transformers_5() -> None:
    new = {k: v for k, v in ONE_BILLION.items() if not k.startswith(("rope", "sliding_window_pattern"))}
    new["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000},
        "full_attention": {"rope_type": "linear", "factor": 4, "rope_theta": 2e6},
    }
    new["layer_types"] = (["sliding_attention"] * 3 + ["full_attention"]) * 6 + ["sliding_attention"] * 2
    assert from_hf(new) == GEMMA3["1b"].with_fields(
        {
            "rope_local": Rope(theta=5000.0),
            "rope_global": Rope(theta=2e6, factor=4.0),
            "layers.pattern": local_then_global(4),
        }
    )


@settings(max_examples=50, deadline=None)
@given(
    layers=st.integers(1, 40),
    pattern=st.integers(1, 8),
    scalar=st.integers(1, 2000),
    scale=st.sampled_from([1.0, 8.0, 2.5]),
    cap=st.sampled_from([None, 30.0]),
)
def test_written_and_read_again(layers: int, pattern: int, scalar: int, scale: float, cap: float | None) -> None:
    config = GEMMA3["tiny"].with_fields(
        {
            "layers.num_layers": layers,
            "layers.pattern": local_then_global(pattern),
            "attention.query_scale": scalar**-0.5,
            "rope_global": Rope(theta=1_000_000.0, factor=scale),
            "head.soft_cap": cap,
        }
    )
    assert from_hf(to_hf(config)) == config


def test_layers_in_any_order() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"] * 8 + ["full_attention", "sliding_attention"]
    config = from_hf({k: v for k, v in ONE_BILLION.items() if k != "sliding_window_pattern"} | {"layer_types": kinds})
    assert (config.layers.pattern, config.layers.periods, config.layers.suffix) == (
        ("global", "local", "local"),
        8,
        ("global", "local"),
    )
    assert from_hf(to_hf(config)) == config
    irregular = ["full_attention"] * 3 + ["sliding_attention"] * 23
    assert from_hf(ONE_BILLION | {"layer_types": irregular}).layers.pattern == ("global",) * 3 + ("local",) * 23


def test_every_field_that_is_not_understood_is_named() -> None:
    with pytest.raises(WeightsError) as caught:
        from_hf(
            ONE_BILLION
            | {
                "final_logit_softcapping": "30",
                "hidden_size": "1152",
                "rope_scaling": {"rope_type": "ntk_by_parts", "factor": 4.0},
                "num_experts": 8,
                "sliding_windows": 12,
                "use_qk_clip": False,
                "layer_types": ["full_attention", "sliding_attention"] * 12,
            }
        )
    assert str(caught.value) == "\n  ".join(
        [
            "config.json is not a Gemma 3 that can be read:",
            "hidden_size: expected an integer above 0, got '1152'",
            "num_experts=8: not understood, and it could change the mathematics",
            "sliding_windows=12: not understood, and it could change the mathematics",
            "layer_types: expected 26 layers of the kinds 'sliding_attention' and 'full_attention', got "
            + repr(["full_attention", "sliding_attention"] * 12),
            "rope_scaling: only rope_type 'default', 'linear', 'dynamic', 'llama3', 'proportional' and 'yarn' are "
            "implemented, got 'ntk_by_parts'",
            "final_logit_softcapping: expected a number above 0 or null, got '30'",
        ]
    )


def known() -> str:
    """The model types that can be read now: other tests register one of their own."""
    return ", ".join(map(repr, sorted({n for family in FAMILIES for n in family.model_types + family.wrappers})))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model_type: expected one of KNOWN, got 'bert'"),
        ({}, "model_type: expected one of KNOWN, got None"),
        ({"model_type": "gemma3"}, "text_config: a gemma3 config.json holds the text decoder there; it is missing"),
        (
            ONE_BILLION | {"num_key_value_heads": 3},
            "config.json is not a Gemma 3 that can be read: num_heads=4 is not a multiple of num_kv_heads=3",
        ),
        (
            FOUR_BILLION | {"tie_word_embeddings": False},
            "config.json is not a Gemma 3 that can be read:\n"
            "  tie_word_embeddings: only True is implemented, got False",
        ),
        (
            ONE_BILLION | {"rope_parameters": {"rope_theta": 1.0}},
            "config.json is not a Gemma 3 that can be read:\n"
            "  rope_parameters: expected entries 'sliding_attention' and "
            "'full_attention', got {'rope_theta': 1.0}",
        ),
    ],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        from_hf(config)
    assert str(caught.value) == message.replace("KNOWN", known())


def test_impossible_numbers() -> None:
    with pytest.raises(ValueError, match="head_dim=7 is odd"):
        attrs.evolve(GEMMA3["tiny"], head_dim=7)
    with pytest.raises(ValueError, match="window must be above 0, got 0"):
        attrs.evolve(GEMMA3["tiny"], window=0)
    assert isinstance(GEMMA3["tiny"], DecoderConfig)
