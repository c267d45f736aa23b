"""Llama's published sizes and every spelling of its config.json."""

from __future__ import annotations

import math
import sys
from typing import Any, get_args

import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl import Model
from nnxdsl.config.core.fields import resolve
from nnxdsl.errors import WeightsError
from nnxdsl.models import params
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import local_then_global
from nnxdsl.models.config.rope import Llama3RopeScaling, Rope, Yarn
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.families.registry import from_hf, to_hf

# config.json of meta-llama/Llama-3.1-8B, and what other published files have in its place.
EIGHT_BILLION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
THIRTY_TWO = {**EIGHT_BILLION["rope_scaling"], "factor": 32.0}
OTHERS: dict[str, dict[str, Any]] = {
    "1b": {
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": THIRTY_TWO,
        "tie_word_embeddings": True,
    },
    "3b": {
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "rope_scaling": THIRTY_TWO,
        "tie_word_embeddings": True,
    },
    "8b": {},
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "405b": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
    },
}


@pytest.mark.parametrize("size", OTHERS)
def test_published_files(size: str) -> None:
    assert from_hf(EIGHT_BILLION | OTHERS[size]) == LLAMA3[size]


# As the Hub counts the published safetensors files (405b: by its report's dimensions).
@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_published_parameter_counts(size: str, parameters: int) -> None:
    template = params.abstract(lambda: Decoder(LLAMA3[size], rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in template.variables.values()) == parameters


def test_the_spec_has_the_sizes_that_there_are() -> None:
    for model, sizes in ((Model.Gemma3, GEMMA3), (Model.Llama3, LLAMA3)):
        assert get_args(resolve(model, vars(sys.modules[model.__module__]), {"size"})["size"]) == tuple(sizes)


def test_spelling_of_transformers_5() -> None:
    new = {k: v for k, v in EIGHT_BILLION.items() if not k.startswith("rope")}
    new |= {"rope_parameters": {**EIGHT_BILLION["rope_scaling"], "rope_theta": 500000.0}, "head_dim": None}
    assert from_hf(new) == LLAMA3["8b"]


def test_llama_3_0_and_what_a_file_leaves_out() -> None:
    plain = from_hf({"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": None})
    assert plain.rope_global == Rope(theta=500_000.0)
    assert (plain.num_kv_heads, plain.head_dim, plain.max_length, plain.head.tied) == (32, 128, 2048, False)
    assert from_hf({"model_type": "llama"}).rope_global == Rope(theta=10_000.0)


@settings(max_examples=50, deadline=None)
@given(
    layers=st.integers(1, 40),
    heads=st.sampled_from([(4, 2, 32), (6, 3, 20), (8, 8, 16)]),
    scale=st.sampled_from([1.0, 8.0, 2.5]),
    ramp=st.sampled_from(
        [
            None,
            Llama3RopeScaling(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256),
            Llama3RopeScaling(low_freq_factor=0.5, high_freq_factor=3.5, original_max_position_embeddings=77),
            Yarn(original_max_position_embeddings=64, attention_factor=1.2),
            Yarn(
                beta_slow=0.5, beta_fast=20.0, original_max_position_embeddings=77, attention_factor=1.0, truncate=False
            ),
        ]
    ),
    tied=st.booleans(),
)
def test_written_and_read_again(
    layers: int, heads: tuple[int, int, int], scale: float, ramp: Llama3RopeScaling | Yarn | None, tied: bool
) -> None:
    config = LLAMA3["tiny"].with_fields(
        {
            "layers.num_layers": layers,
            "num_heads": heads[0],
            "num_kv_heads": heads[1],
            "head_dim": heads[2],
            "attention.query_scale": heads[2] ** -0.5,
            "rope_global": Rope(theta=500_000.0, factor=scale, scaling=ramp),
            "head.tied": tied,
        }
    )
    assert from_hf(to_hf(config)) == config


def test_every_field_that_is_not_understood_is_named() -> None:
    with pytest.raises(WeightsError) as caught:
        from_hf(
            EIGHT_BILLION
            | {
                "attention_bias": 1,
                "mlp_bias": "yes",
                "hidden_act": "mish",
                "hidden_size": None,
                "rms_norm_eps": "1e-5",
                "sliding_window": 4096,
                "tie_word_embeddings": "no",
                "quantization_config": {"bits": 4},
                "rope_scaling": {"rope_type": "ntk_by_parts", "factor": 4.0},
            }
        )
    assert str(caught.value) == "\n  ".join(
        [
            "config.json is not a Llama 3 that can be read:",
            "hidden_size: expected an integer above 0, got None",
            "rms_norm_eps: expected a number above 0, got '1e-5'",
            "sliding_window=4096: not understood, and it could change the mathematics",
            "quantization_config: only quant_method 'mxfp4', 'fp8' and 'compressed-tensors' are read, got {'bits': 4}; "
            "convert the weights to bfloat16",
            "attention_bias: expected true or false, got 1",
            "mlp_bias: expected true or false, got 'yes'",
            "hidden_act: expected one of 'silu', 'swish', 'gelu_pytorch_tanh', 'gelu_new', 'gelu', 'relu' and 'relu2', "
            "got 'mish'",
            "rope_scaling: only rope_type 'default', 'linear', 'dynamic', 'llama3', 'proportional' and 'yarn' are "
            "implemented, got 'ntk_by_parts'",
            "tie_word_embeddings: expected true or false, got 'no'",
        ]
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "rope_scaling",
            {"rope_type": "llama3", "factor": 8.0},
            "low_freq_factor: expected a number above 0, got None",
        ),
        (
            "rope_scaling",
            {**THIRTY_TWO, "low_freq_factor": 8.0},
            "expected 0 < low_freq_factor < high_freq_factor, got low_freq_factor=8.0 and high_freq_factor=4.0",
        ),
        ("rope_scaling", {**THIRTY_TWO, "attention_factor": 2.0}, "not understood: {'attention_factor': 2.0}"),
        ("rope_scaling", "llama3", "expected an object, got 'llama3'"),
        ("rope_parameters", {"rope_type": "linear", "factor": True}, "factor: expected a number above 0, got True"),
    ],
)
def test_rope_that_is_not_understood(field: str, value: object, message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        from_hf(EIGHT_BILLION | {field: value})
    assert str(caught.value) == f"config.json is not a Llama 3 that can be read:\n  {field}: {message}"


def test_impossible_choices() -> None:
    with pytest.raises(ValueError, match="has local layers, which need a window"):
        LLAMA3["tiny"].with_fields({"layers.pattern": local_then_global(2)})
    with pytest.raises(ValueError, match=r"norm.placement: expected one of \('pre', 'sandwich', 'post'\), got 'after'"):
        LLAMA3["tiny"].with_fields({"norm.placement": "after"})
    assert isinstance(LLAMA3["tiny"], DecoderConfig)
