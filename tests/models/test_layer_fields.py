"""Biases, activations and RoPE that grows with length: in each family that has the field, read, built and written."""

from __future__ import annotations

import contextlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.errors import WeightsError
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models.config.rope import DynamicNTK, Rope
from nnxdsl.models.families.family import Family
from nnxdsl.models.families.registry import FAMILIES, from_hf, to_hf
from nnxdsl.models.layers.rope import rope_tables

MEMBERS = {family.model_types[0]: family for family in FAMILIES}
WITH_BIAS = {  # as transformers has them
    "attention_bias": {
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe"),
        *(
            "glm4_moe_lite",
            "glm_moe_dsa",
            "gpt_oss",
            "granite",
            "llama",
            "llama4_text",
            "mistral4",
            "muse_glimmer_text",
        ),
        *("olmo3", "olmo_hybrid", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3"),
    },
    "mlp_bias": {"deepseek_v2", "granite", "llama", "nemotron_h", "smollm3"},
}


def fields_of(family: Family) -> dict[str, Any]:
    """The `config.json` of its tiny preset, of the text decoder."""
    written = to_hf(family.sizes["tiny"], like=family.model_types[0])
    return written.get("text_config", written)


@pytest.mark.parametrize("flag", WITH_BIAS)
def test_the_families_with_a_field_are_those_of_transformers(flag: str) -> None:
    assert {name for name, family in MEMBERS.items() if flag in family.layers.reads()} == WITH_BIAS[flag]


@pytest.mark.parametrize("name", MEMBERS)
def test_lists_of_lists_are_refused(name: str) -> None:
    fields = fields_of(MEMBERS[name])
    layers = fields["num_hidden_layers"]
    lists = [key for key, value in fields.items() if isinstance(value, list) and key != "architectures"]
    for key in {*lists, "layer_types", "mlp_layer_types", "layer_rope_theta", "no_rope_layers", "attn_type_list"}:
        with contextlib.suppress(WeightsError):  # where it is a field without effect it is not read
            from_hf({**fields, key: [["full_attention"]] * layers})


@pytest.mark.parametrize("name", MEMBERS)
def test_every_field_is_read_built_and_written(name: str) -> None:
    family = MEMBERS[name]
    flags = [flag for flag in WITH_BIAS if flag in family.layers.reads()]
    fields = fields_of(family) | dict.fromkeys(family.layers.activation, "gelu")
    plain = from_hf(fields | dict.fromkeys(flags, False))
    config = from_hf(fields | dict.fromkeys(flags, True))
    assert config.mlp.activation == ("gelu" if family.layers.activation else "silu")
    written = to_hf(config, like=name)
    assert from_hf(written.get("text_config", written)) == config
    variables = abstract_decoder(config).variables
    sources = tensor_sources(config, name)
    assert variables.keys() == sources.keys()
    more = sources.keys() - tensor_sources(plain, name).keys()
    assert all(path.endswith(".bias") for path in more)
    for flag, part in (("attention_bias", ".attention."), ("mlp_bias", ".mlp.")):
        assert any(part in path for path in more) == (flag in flags), flag


def test_a_field_that_a_family_does_not_have_is_refused() -> None:
    for name in ("mistral", "qwen2"):
        with pytest.raises(WeightsError, match="attention_bias=True: not understood"):
            from_hf(fields_of(MEMBERS[name]) | {"attention_bias": True})
    with pytest.raises(WeightsError, match="mlp_bias=True: not understood"):
        from_hf(fields_of(MEMBERS["qwen3"]) | {"mlp_bias": True})


def test_dynamic_rope_has_a_base_for_each_length() -> None:
    """`theta (factor L / original - (factor - 1)) ^ (d / (d - 2))`, of each sequence by its own length."""
    scaling = DynamicNTK(original_max_position_embeddings=16)
    rope, plain = Rope(theta=500.0, factor=4.0, scaling=scaling), Rope(theta=500.0)
    position, length = jnp.asarray([[3, 5], [3, 40]]), jnp.asarray([[16, 16], [41, 41]])
    short = rope_tables(position[:1], 8, rope, length[:1])
    np.testing.assert_allclose(short, rope_tables(position[:1], 8, plain), atol=1e-6)
    base = 500.0 * (4.0 * 41 / 16 - 3.0) ** (8 / 6)
    sin, cos = rope_tables(position, 8, rope, length)
    angle = 40 / base ** (np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(sin[1, 1], np.sin(angle), atol=2e-5)
    np.testing.assert_allclose(cos[1, 1], np.cos(angle), atol=2e-5)


def test_dynamic_rope_extends_the_context() -> None:
    entry = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.5}
    fields = {**fields_of(MEMBERS["llama"]), "max_position_embeddings": 16, "rope_parameters": entry}
    config = from_hf({name: value for name, value in fields.items() if name not in ("rope_theta", "rope_scaling")})
    assert (config.max_length, config.short_length) == (40, 16)
    written = to_hf(config, like="llama")
    assert (written["max_position_embeddings"], written["rope_scaling"]) == (
        16,
        {"rope_type": "dynamic", "factor": 2.5},
    )
    assert from_hf(written) == config
    assert config.generation_problem(10, 6) is None
    for prompt in (10, 17):  # keys in a cache have the base of an earlier length
        assert "above which this model has other rotary positions" in str(config.generation_problem(prompt, 7))


def test_windows_of_smollm3_are_of_layers_with_or_without_positions() -> None:
    fields = fields_of(MEMBERS["smollm3"]) | {"use_sliding_window": True, "sliding_window": 6}
    del fields["layer_types"]
    without = from_hf(fields)
    assert without.layers.kinds == ("global", "global", "global", "local")
    assert without.rope_local is not None
    assert without.rope_local.partial_rotary_factor == 0
    names = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    rotary = from_hf(fields | {"layer_types": names})
    assert (rotary.layers.kinds, rotary.rope_local) == (("local", "global", "global", "nope"), None)
    for config in (without, rotary):
        assert from_hf(to_hf(config, like="smollm3")) == config
    with pytest.raises(WeightsError, match="either all with rotary positions or all without, got both"):
        from_hf(fields | {"layer_types": ["sliding_attention"] * 4})
    with pytest.raises(WeightsError, match="'sliding_attention' needs use_sliding_window=true and a sliding_window"):
        from_hf(fields | {"layer_types": names, "use_sliding_window": False})


def test_the_limits_of_gpt_oss_are_fields() -> None:
    fields = fields_of(MEMBERS["gpt_oss"]) | {"swiglu_limit": 0.5, "swiglu_alpha": 1.2}
    config = from_hf(fields)
    assert config.moe is not None
    assert (config.moe.swiglu_limit, config.moe.swiglu_alpha) == (0.5, 1.2)
    written = to_hf(config, like="gpt_oss")
    assert (written["swiglu_limit"], written["swiglu_alpha"]) == (0.5, 1.2)
    assert from_hf(written) == config
