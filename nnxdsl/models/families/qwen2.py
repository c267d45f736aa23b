"""Qwen2 and Qwen2.5: the published sizes (Qwen Team, arXiv:2412.15115), and their spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, Rope
from nnxdsl.models.families.hf_config import (
    NUMBERS,
    USUAL,
    ConfigFile,
    Family,
    by_head_dim,
    fill_heads,
    late_windows,
    layer_types,
    numbers_to_hf,
    rope_to_hf,
)

# What tells a Qwen2 from other decoders; whether its head is tied depends on the size.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "mla": None,
    "moe": None,
    "attention_bias": "qkv",
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _qwen2(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, head_dim: int = 128, tied: bool = False,
    vocab: int = 152_064, length: int = 32_768,
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
        tied_head=tied,
        **_CHOICES,
    )


# Qwen2.5 as the published config.json files have it; `tiny` is ours, for laptops and the byte tokenizer.
QWEN2: dict[str, DecoderConfig] = {
    "tiny": _qwen2(layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, tied=True, vocab=320, length=1024),
    "0.5b": _qwen2(layers=24, embed=896, mlp=4864, heads=14, kv_heads=2, head_dim=64, tied=True, vocab=151_936),
    "1.5b": _qwen2(layers=28, embed=1536, mlp=8960, heads=12, kv_heads=2, tied=True, vocab=151_936),
    "3b": _qwen2(layers=36, embed=2048, mlp=11_008, heads=16, kv_heads=2, tied=True, vocab=151_936),
    "7b": _qwen2(layers=28, embed=3584, mlp=18_944, heads=28, kv_heads=4),
    "14b": _qwen2(layers=48, embed=5120, mlp=13_824, heads=40, kv_heads=8),
    "32b": _qwen2(layers=64, embed=5120, mlp=27_648, heads=40, kv_heads=8),
    "72b": _qwen2(layers=80, embed=8192, mlp=29_568, heads=64, kv_heads=8),
}

# Defaults of transformers' Qwen2Config; None is worked out from the others.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0}
_OTHERS = (
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE; with `use_sliding_window` the layers from `max_window_layers` on have a window."""
    file = ConfigFile("Qwen2", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    fill_heads(file, numbers)
    return file.decoder(
        rope_global=file.one_rope(),
        query_scale=numbers["head_dim"] ** -0.5,
        tied_head=file.flag("tie_word_embeddings", False),
        **late_windows(file, numbers["num_hidden_layers"]),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        **numbers_to_hf(config),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "layer_types": layer_types(config),
        **rope_to_hf(config.rope_global),
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


FAMILY = Family(
    title="Qwen2",
    architecture="Qwen2ForCausalLM",
    model_types=("qwen2",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=by_head_dim,
)
