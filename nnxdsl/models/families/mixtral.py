"""Mixtral: the published sizes (Jiang et al. 2024, arXiv:2401.04088), and its spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, MoEConfig, Rope
from nnxdsl.models.families.hf_config import (
    NUMBERS,
    USUAL,
    ConfigFile,
    Family,
    by_head_dim,
    fill_heads,
    numbers_to_hf,
    rope_to_hf,
)
from nnxdsl.models.families.mistral import pattern_of

# What tells a Mixtral from other decoders; its layers all have a window, or none has.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "mla": None,
    "dense_layers": 0,
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _mixtral(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int = 8, head_dim: int = 128, experts: int = 8,
    per_token: int = 2, vocab: int = 32_000, length: int,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        window=None,
        pattern=("global",),
        rope_global=Rope(theta=1e6),
        query_scale=head_dim**-0.5,
        norm_eps=1e-5,
        max_length=length,
        moe=MoEConfig(num_experts=experts, num_experts_per_tok=per_token, mlp_dim=mlp),
        tied_head=False,
        **_CHOICES,
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
MIXTRAL: dict[str, DecoderConfig] = {
    "tiny": _mixtral(layers=4, embed=128, mlp=128, heads=4, kv_heads=2, head_dim=32, experts=4, vocab=320, length=1024),
    "8x7b": _mixtral(layers=32, embed=4096, mlp=14_336, heads=32, length=32_768),
    "8x22b": _mixtral(layers=56, embed=6144, mlp=16_384, heads=48, length=65_536),
}

# Defaults of transformers' MixtralConfig; None is worked out from the others.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "router_jitter_noise": 0.0}
# Read below; and those of the router's auxiliary loss, which an experiment says.
_OTHERS = (
    "sliding_window",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "output_router_logits",
    "router_aux_loss_coef",
)


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE."""
    file = ConfigFile("Mixtral", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    fill_heads(file, numbers)
    window = file.window(None)
    return file.decoder(
        window=window,
        pattern=pattern_of(window),
        rope_global=file.one_rope(1e6),
        query_scale=numbers["head_dim"] ** -0.5,
        moe=file.experts(
            num_experts=numbers["num_local_experts"],
            num_experts_per_tok=numbers["num_experts_per_tok"],
            mlp_dim=numbers["intermediate_size"],
        ),
        tied_head=file.flag("tie_word_embeddings", False),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None  # or it is refused
    return {
        "model_type": "mixtral",
        **numbers_to_hf(config),
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_experts_per_tok,
        "sliding_window": config.window,
        **rope_to_hf(config.rope_global),
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


def _derived(config: DecoderConfig) -> dict[str, object]:
    """It has experts, all of the width of its config's MLP, scored and weighted in one way."""
    count, per_token = (config.moe.num_experts, config.moe.num_experts_per_tok) if config.moe else (8, 2)
    experts = MoEConfig(num_experts=count, num_experts_per_tok=per_token, mlp_dim=config.mlp_dim)
    return {**by_head_dim(config), "pattern": pattern_of(config.window), "moe": experts}


FAMILY = Family(
    title="Mixtral",
    architecture="MixtralForCausalLM",
    model_types=("mixtral",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=_derived,
)
