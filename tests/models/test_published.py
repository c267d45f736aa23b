"""Published `config.json` files of the families, in the Hub's spelling and in that of transformers 5, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from nnxdsl.errors import WeightsError
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.gemma import GEMMA
from nnxdsl.models.families.gemma2 import GEMMA2
from nnxdsl.models.families.mistral import MISTRAL
from nnxdsl.models.families.olmo3 import OLMO3
from nnxdsl.models.families.qwen2 import QWEN2
from nnxdsl.models.families.qwen3 import QWEN3
from nnxdsl.models.families.registry import from_hf, to_hf

ABOUT = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.42.4", "use_cache": True}
GEMMA_2B = {
    **ABOUT,
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
GEMMA2_2B = {
    **ABOUT,
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
MISTRAL_7B = {
    **ABOUT,
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2_05B = {
    **ABOUT,
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    **ABOUT,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMO3_7B = {
    **ABOUT,
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}
PUBLISHED = [
    (GEMMA_2B, GEMMA["2b"]),
    (GEMMA2_2B, GEMMA2["2b"]),
    (MISTRAL_7B, MISTRAL["7b-v0.1"]),
    (MISTRAL_7B | {"sliding_window": None, "rope_theta": 1e6, "vocab_size": 32768}, MISTRAL["7b"]),
    (QWEN2_05B, QWEN2["0.5b"]),
    (QWEN3_06B, QWEN3["0.6b"]),
    (OLMO3_7B, OLMO3["7b"]),
]
KINDS = [file["model_type"] for file, _ in PUBLISHED]


@pytest.mark.parametrize(("file", "config"), PUBLISHED, ids=KINDS)
def test_published_files(file: dict[str, Any], config: DecoderConfig) -> None:
    assert from_hf(file) == config
    written = to_hf(config, like=file["model_type"])
    assert written["model_type"] == file["model_type"]
    assert from_hf(written) == config


@pytest.mark.parametrize(("file", "config"), PUBLISHED, ids=KINDS)
def test_spelling_of_transformers_5(file: dict[str, Any], config: DecoderConfig) -> None:
    new = {name: value for name, value in file.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new["rope_parameters"] = {
        "rope_type": "default",
        **(file.get("rope_scaling") or {}),
        "rope_theta": file["rope_theta"],
    }
    new["dtype"] = "bfloat16"
    assert from_hf(new) == config


@pytest.mark.parametrize(("file", "config"), PUBLISHED, ids=KINDS)
def test_what_would_change_the_mathematics_is_refused(file: dict[str, Any], config: DecoderConfig) -> None:
    with pytest.raises(WeightsError) as caught:
        from_hf(file | {"num_experts": 8, "attention_multiplier": 0.5, "rope_scaling": {"rope_type": "su"}})
    assert str(caught.value).splitlines()[1:] == [
        "  num_experts=8: not understood, and it could change the mathematics",
        "  attention_multiplier=0.5: not understood, and it could change the mathematics",
        "  rope_scaling: only rope_type 'default', 'linear', 'dynamic', 'llama3', 'proportional' and 'yarn' are "
        "implemented, got 'su'",
    ]


def test_heads_that_turn_in_part_are_refused_where_the_family_has_none() -> None:
    entry = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    with pytest.raises(WeightsError, match=r"rope_parameters: not understood: \{'partial_rotary_factor': 0.5\}"):
        from_hf(QWEN3_06B | {"rope_parameters": entry})


def test_windows_of_the_later_layers() -> None:
    config = from_hf(QWEN2_05B | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 21})
    assert (config.window, config.layers.kinds) == (512, ("global",) * 21 + ("local",) * 3)
    assert from_hf(to_hf(config, like="qwen2")) == config


def test_an_activation_that_is_not_said() -> None:
    with pytest.raises(WeightsError, match="hidden_act: 'gelu' has two meanings in files of this family: set hidden"):
        from_hf(GEMMA_2B | {"hidden_activation": None})
    assert from_hf(GEMMA_2B | {"hidden_activation": "gelu"}).mlp.activation == "gelu"


def test_yarn_without_its_amplitude() -> None:
    """0.1 ln(factor) + 1, or the ratio of two such numbers."""
    scaling = {name: value for name, value in OLMO3_7B["rope_scaling"].items() if name != "attention_factor"}
    assert from_hf(OLMO3_7B | {"rope_scaling": scaling}).rope_global.scaling.attention_factor == pytest.approx(
        1.2079441541679836
    )
    both = from_hf(OLMO3_7B | {"rope_scaling": {**scaling, "mscale": 1.0, "mscale_all_dim": 0.5}})
    assert both.rope_global.scaling.attention_factor == pytest.approx(1.2079441541679836 / 1.1039720770839918)
