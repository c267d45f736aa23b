"""Qwen3: the published dense sizes (Qwen Team, arXiv:2505.09388), and its spelling of `config.json`; no jax."""

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

# What tells a Qwen3 from other decoders; whether its head is tied depends on the size.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "mla": None,
    "moe": None,
    "query_key_norm": "head",
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _qwen3(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, head_dim: int = 128, tied: bool = False,
    vocab: int = 151_936, length: int = 40_960,
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


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
QWEN3: dict[str, DecoderConfig] = {
    "tiny": _qwen3(layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, tied=True, vocab=320, length=1024),
    "0.6b": _qwen3(layers=28, embed=1024, mlp=3072, heads=16, kv_heads=8, tied=True),
    "1.7b": _qwen3(layers=28, embed=2048, mlp=6144, heads=16, kv_heads=8, tied=True),
    "4b": _qwen3(layers=36, embed=2560, mlp=9728, heads=32, kv_heads=8, tied=True),
    "8b": _qwen3(layers=36, embed=4096, mlp=12_288, heads=32, kv_heads=8),
    "14b": _qwen3(layers=40, embed=5120, mlp=17_408, heads=40, kv_heads=8),
    "32b": _qwen3(layers=64, embed=5120, mlp=25_600, heads=64, kv_heads=8),
}

# Defaults of transformers' Qwen3Config; None is worked out from the others.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False}
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
    file = ConfigFile("Qwen3", fields)
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
        "model_type": "qwen3",
        **numbers_to_hf(config),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "layer_types": layer_types(config),
        **rope_to_hf(config.rope_global),
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


FAMILY = Family(
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=by_head_dim,
)
