"""Gemma 2: the published sizes (Gemma Team, arXiv:2408.00118), and its spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, Rope, local_then_global
from nnxdsl.models.families.hf_config import NUMBERS, USUAL, ConfigFile, Family, layer_types, numbers_to_hf, rope_to_hf

# What tells a Gemma 2 from other decoders.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "mla": None,
    "moe": None,
    "norms": "sandwich",
    "norm_scale": "zero_centred",
    "gated_deltanet": None,
    "activation": "gelu_tanh",
    "scale_embedding": True,
    "tied_head": True,
}
_SCORES, _LOGITS = 50.0, 30.0


def _gemma2(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, head_dim: int = 256, scalar: int = 256,
    window: int = 4096, vocab: int = 256_000, length: int = 8192,
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
        pattern=local_then_global(2),
        rope_global=Rope(theta=10_000.0),
        query_scale=scalar**-0.5,
        attention_soft_cap=_SCORES,
        logit_soft_cap=_LOGITS,
        max_length=length,
        **_CHOICES,
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GEMMA2: dict[str, DecoderConfig] = {
    "tiny": _gemma2(layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, scalar=32, window=64, vocab=320,
                    length=1024),
    "2b": _gemma2(layers=26, embed=2304, mlp=9216, heads=8, kv_heads=4),
    "9b": _gemma2(layers=42, embed=3584, mlp=14_336, heads=16, kv_heads=8),
    "27b": _gemma2(layers=46, embed=4608, mlp=36_864, heads=32, kv_heads=16, head_dim=128, scalar=144),
}  # fmt: skip

# Defaults of transformers' Gemma2Config.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
}
# Read below; `hidden_act`, which transformers does not read here; and `sliding_window_size`, of the first files.
_OTHERS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "layer_types",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "hidden_act",
    "sliding_window_size",
)


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE, which all layers share; without `layer_types` every second layer is global."""
    file = ConfigFile("Gemma 2", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    return file.decoder(
        window=numbers["sliding_window"],
        pattern=file.pattern(numbers["num_hidden_layers"], local_then_global(2)),
        rope_global=file.one_rope(),
        query_scale=numbers["query_pre_attn_scalar"] ** -0.5,
        attention_soft_cap=file.soft_cap("attn_logit_softcapping", _SCORES),
        logit_soft_cap=file.soft_cap("final_logit_softcapping", _LOGITS),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        **numbers_to_hf(config),
        "sliding_window": config.window or _DEFAULTS["sliding_window"],  # without local layers it has no effect
        "layer_types": layer_types(config),
        **rope_to_hf(config.rope_global),
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        **_FIXED,
    }


FAMILY = Family(
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    model_types=("gemma2",),
    choices=_CHOICES,
    read=_read,
    write=_write,
)
