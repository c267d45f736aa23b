"""GPT-OSS: the published sizes (OpenAI 2025, arXiv:2508.10925), and its spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, MoEConfig, Rope, Yarn
from nnxdsl.models.families.hf_config import (
    NUMBERS,
    USUAL,
    ConfigFile,
    Family,
    by_head_dim,
    fill_heads,
    layer_types,
    numbers_to_hf,
    rope_to_hf,
)

# What tells a GPT-OSS from other decoders.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "mla": None,
    "dense_layers": 0,
    "sinks": True,
    "attention_bias": "all",
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}
_ROUTED: dict[str, Any] = {
    "scoring": "softmax_of_chosen",
    "router_bias": True,
    "expert_bias": True,
    "activation": "clamped_swiglu",
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_AMPLITUDE = 1.3465735902799727  # 0.1 ln 32 + 1


def _gpt_oss(
    *, layers: int, embed: int = 2880, mlp: int = 2880, heads: int = 64, kv_heads: int = 8, head_dim: int = 64,
    experts: int, per_token: int = 4, window: int = 128, before: int = 4096, vocab: int = 201_088,
    length: int = 131_072,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        pattern=("local", "global"),
        rope_global=Rope(
            theta=150_000.0,
            factor=32.0,
            scaling=Yarn(original_max_position_embeddings=before, attention_factor=_AMPLITUDE, truncate=False),
        ),
        query_scale=head_dim**-0.5,
        norm_eps=1e-5,
        max_length=length,
        moe=MoEConfig(num_experts=experts, num_experts_per_tok=per_token, mlp_dim=mlp, **_ROUTED),
        tied_head=False,
        **_CHOICES,
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GPT_OSS: dict[str, DecoderConfig] = {
    "tiny": _gpt_oss(layers=4, embed=128, mlp=128, heads=4, kv_heads=2, head_dim=32, experts=4, per_token=2, window=64,
                     before=64, vocab=320, length=1024),
    "20b": _gpt_oss(layers=24, experts=32),
    "120b": _gpt_oss(layers=36, experts=128),
}  # fmt: skip

# Defaults of transformers' GptOssConfig.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
# Read below, or said twice; and those of the router's auxiliary loss, which an experiment says.
_OTHERS = (
    "layer_types",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "experts_per_token",
    "initial_context_length",
    "output_router_logits",
    "router_aux_loss_coef",
)


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE, which all layers share; without `layer_types` every second layer is global."""
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = {**fields, "rope_scaling": _YARN}
    file = ConfigFile("GPT-OSS", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    fill_heads(file, numbers)
    return file.decoder(
        window=numbers["sliding_window"],
        pattern=file.pattern(numbers["num_hidden_layers"], ("local", "global")),
        rope_global=file.one_rope(150_000.0),
        query_scale=numbers["head_dim"] ** -0.5,
        moe=file.experts(
            num_experts=numbers["num_local_experts"],
            num_experts_per_tok=numbers["num_experts_per_tok"],
            mlp_dim=numbers["intermediate_size"],
            **_ROUTED,
        ),
        tied_head=file.flag("tie_word_embeddings", False),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None  # or it is refused
    return {
        "model_type": "gpt_oss",
        **numbers_to_hf(config),
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_experts_per_tok,
        "sliding_window": config.window or _DEFAULTS["sliding_window"],  # without local layers it has no effect
        "layer_types": layer_types(config),
        **rope_to_hf(config.rope_global),
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


def _derived(config: DecoderConfig) -> dict[str, object]:
    """It has experts, all of the width of its config's MLP, scored and weighted in one way."""
    count, per_token = (config.moe.num_experts, config.moe.num_experts_per_tok) if config.moe else (32, 4)
    experts = MoEConfig(num_experts=count, num_experts_per_tok=per_token, mlp_dim=config.mlp_dim, **_ROUTED)
    return {**by_head_dim(config), "moe": experts}


FAMILY = Family(
    title="GPT-OSS",
    architecture="GptOssForCausalLM",
    model_types=("gpt_oss",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=_derived,
)
