"""Qwen3's mixtures of experts: the published sizes (Qwen Team, arXiv:2505.09388), and their `config.json`; no jax."""

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
    dense_as_read,
    dense_to_hf,
    fill_heads,
    numbers_to_hf,
    rope_to_hf,
)
from nnxdsl.models.families.mistral import pattern_of

# What tells such a decoder from others; its layers all have a window, or none has.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "mla": None,
    "query_key_norm": "head",
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _qwen3_moe(
    *, layers: int, embed: int, mlp: int, expert: int, heads: int, kv_heads: int = 4, head_dim: int = 128,
    experts: int = 128, per_token: int = 8, vocab: int = 151_936, length: int = 40_960,
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
        max_length=length,
        moe=MoEConfig(num_experts=experts, num_experts_per_tok=per_token, mlp_dim=expert),
        tied_head=False,
        **_CHOICES,
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
QWEN3_MOE: dict[str, DecoderConfig] = {
    "tiny": _qwen3_moe(layers=4, embed=128, mlp=384, expert=64, heads=4, kv_heads=2, head_dim=32, experts=8,
                       per_token=2, vocab=320, length=1024),
    "30b-a3b": _qwen3_moe(layers=48, embed=2048, mlp=6144, expert=768, heads=32),
    "235b-a22b": _qwen3_moe(layers=94, embed=4096, mlp=12_288, expert=1536, heads=64),
}  # fmt: skip

# Defaults of transformers' Qwen3MoeConfig; None is worked out from the others.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
}
# Read below; those of the router's auxiliary loss, which an experiment says; and the number of layers without a window
# in dense models of the family, which has no effect in these.
_OTHERS = (
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "num_local_experts",
    "decoder_sparse_step",
    "mlp_only_layers",
    "norm_topk_prob",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "output_router_logits",
    "router_aux_loss_coef",
)


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE; with `use_sliding_window` all layers have a window."""
    if "num_local_experts" in fields:  # as transformers 5 calls them
        fields = {"num_experts": fields["num_local_experts"], **fields}
    file = ConfigFile("Qwen3 MoE", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    fill_heads(file, numbers)
    window = file.window(4096) if file.flag("use_sliding_window", False) else None
    experts = file.experts(
        num_experts=numbers["num_experts"],
        num_experts_per_tok=numbers["num_experts_per_tok"],
        mlp_dim=numbers["moe_intermediate_size"],
        norm_topk_prob=file.flag("norm_topk_prob", False),
    )
    return file.decoder(
        window=window,
        rope_global=file.one_rope(),
        query_scale=numbers["head_dim"] ** -0.5,
        **file.feed_forward(pattern_of(window), numbers["num_hidden_layers"], experts),
        tied_head=file.flag("tie_word_embeddings", False),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None  # or it is refused
    return {
        "model_type": "qwen3_moe",
        **numbers_to_hf(config),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_experts_per_tok,
        "moe_intermediate_size": config.moe.mlp_dim,
        "norm_topk_prob": config.moe.norm_topk_prob,
        **dense_to_hf(config),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        **rope_to_hf(config.rope_global),
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


def _derived(config: DecoderConfig) -> dict[str, object]:
    """It has experts, scored in one way."""
    given = config.moe or MoEConfig(num_experts=128, num_experts_per_tok=8, mlp_dim=768)
    experts = MoEConfig(
        num_experts=given.num_experts,
        num_experts_per_tok=given.num_experts_per_tok,
        mlp_dim=given.mlp_dim,
        norm_topk_prob=given.norm_topk_prob,
    )
    return {**by_head_dim(config), "pattern": pattern_of(config.window), **dense_as_read(config), "moe": experts}


FAMILY = Family(
    title="Qwen3 MoE",
    architecture="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=_derived,
)
