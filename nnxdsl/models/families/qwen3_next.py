"""Qwen3-Next: the published size (Qwen Team, 2025), and its spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, GatedDeltaNetConfig, LayerKind, MoEConfig, Rope
from nnxdsl.models.families.hf_config import (
    LINEAR_KINDS,
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

_PATTERN: tuple[LayerKind, ...] = ("linear", "linear", "linear", "global")
_PART = 0.25
"""Of a head that is turned."""

# What tells a Qwen3-Next from other decoders.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "window": None,
    "rope_local": None,
    "mla": None,
    "dense_layers": 0,
    "norm_scale": "zero_centred",
    "query_key_norm": "head",
    "output_gate": True,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _qwen3_next(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, head_dim: int, delta: GatedDeltaNetConfig,
    experts: MoEConfig, vocab: int = 151_936, length: int = 262_144,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        pattern=_PATTERN,
        gated_deltanet=delta,
        rope_global=Rope(theta=1e7, partial_rotary_factor=_PART),
        query_scale=head_dim**-0.5,
        max_length=length,
        moe=experts,
        tied_head=False,
        **_CHOICES,
    )


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
QWEN3_NEXT: dict[str, DecoderConfig] = {
    "tiny": _qwen3_next(
        layers=4,
        embed=128,
        mlp=384,
        heads=4,
        kv_heads=2,
        head_dim=32,
        delta=GatedDeltaNetConfig(key_heads=2, value_heads=4, key_head_dim=32, value_head_dim=32),
        experts=MoEConfig(
            num_experts=8, num_experts_per_tok=2, mlp_dim=64, shared_expert_dim=64, shared_expert_gate=True
        ),
        vocab=320,
        length=1024,
    ),
    "80b-a3b": _qwen3_next(
        layers=48,
        embed=2048,
        mlp=5120,
        heads=16,
        kv_heads=2,
        head_dim=256,
        delta=GatedDeltaNetConfig(key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128),
        experts=MoEConfig(
            num_experts=512, num_experts_per_tok=10, mlp_dim=512, shared_expert_dim=512, shared_expert_gate=True
        ),
    ),
}

# Defaults of transformers' Qwen3NextConfig.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Read below; and those of the router's auxiliary loss, which an experiment says.
_OTHERS = (
    "full_attention_interval",
    "layer_types",
    "partial_rotary_factor",
    "norm_topk_prob",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "num_local_experts",
    "output_router_logits",
    "router_aux_loss_coef",
)


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE, and of the layers' kinds (`full_attention_interval`; or `layer_types`)."""
    if "num_local_experts" in fields:  # as transformers 5 may call them
        fields = {"num_experts": fields["num_local_experts"], **fields}
    file = ConfigFile("Qwen3-Next", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    fill_heads(file, numbers)
    every = file.count("full_attention_interval", 4, least=1)
    linear: tuple[LayerKind, ...] = ("linear",) * (every - 1)
    pattern = file.pattern(numbers["num_hidden_layers"], (*linear, "global"), LINEAR_KINDS)
    delta = file.part(
        GatedDeltaNetConfig,
        key_heads=numbers["linear_num_key_heads"],
        value_heads=numbers["linear_num_value_heads"],
        key_head_dim=numbers["linear_key_head_dim"],
        value_head_dim=numbers["linear_value_head_dim"],
        conv_kernel=numbers["linear_conv_kernel_dim"],
    )
    return file.decoder(
        pattern=pattern,
        gated_deltanet=delta if "linear" in pattern else None,
        rope_global=file.one_rope(part=_PART),
        query_scale=numbers["head_dim"] ** -0.5,
        moe=file.experts(
            num_experts=numbers["num_experts"],
            num_experts_per_tok=numbers["num_experts_per_tok"],
            mlp_dim=numbers["moe_intermediate_size"],
            shared_expert_dim=numbers["shared_expert_intermediate_size"],
            shared_expert_gate=True,
            norm_topk_prob=file.flag("norm_topk_prob", True),
        ),
        tied_head=file.flag("tie_word_embeddings", False),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    delta, experts = config.gated_deltanet, config.moe
    assert delta is not None  # or it is refused
    assert experts is not None
    return {
        "model_type": "qwen3_next",
        **numbers_to_hf(config),
        "layer_types": layer_types(config),
        "linear_conv_kernel_dim": delta.conv_kernel,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.mlp_dim,
        "shared_expert_intermediate_size": experts.shared_expert_dim,
        "norm_topk_prob": experts.norm_topk_prob,
        "partial_rotary_factor": config.rope_global.partial_rotary_factor,
        **rope_to_hf(config.rope_global),
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


def _derived(config: DecoderConfig) -> dict[str, object]:
    """It has linear layers, and experts beside a shared one that is gated."""
    given = config.moe or MoEConfig(num_experts=512, num_experts_per_tok=10, mlp_dim=512)
    experts = MoEConfig(
        num_experts=given.num_experts,
        num_experts_per_tok=given.num_experts_per_tok,
        mlp_dim=given.mlp_dim,
        shared_expert_dim=given.shared_expert_dim or given.mlp_dim,
        shared_expert_gate=True,
        norm_topk_prob=given.norm_topk_prob,
    )
    return {
        **by_head_dim(config),
        "gated_deltanet": config.gated_deltanet or QWEN3_NEXT["80b-a3b"].gated_deltanet,
        "moe": experts,
    }


FAMILY = Family(
    title="Qwen3-Next",
    architecture="Qwen3NextForCausalLM",
    model_types=("qwen3_next",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=_derived,
    further=True,
)
