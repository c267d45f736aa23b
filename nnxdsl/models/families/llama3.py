"""Llama 3: the published sizes (Llama Team, arXiv:2407.21783), and its spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, Llama3RopeScaling, Rope
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

# What tells a Llama from other decoders; whether its head is tied depends on the size.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "window": None,
    "pattern": ("global",),
    "mla": None,
    "moe": None,
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _llama3(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int = 8, head_dim: int = 128, factor: float,
    tied: bool, vocab: int = 128_256, before: int = 8192, length: int = 131_072,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_global=Rope(
            theta=500_000.0,
            factor=factor,
            scaling=Llama3RopeScaling(
                low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=before
            ),
        ),
        query_scale=head_dim**-0.5,
        norm_eps=1e-5,
        max_length=length,
        tied_head=tied,
        **_CHOICES,
    )


# As the published config.json files have them: 1b and 3b are Llama 3.2, the others Llama 3.1; `tiny` is ours, for
# laptops and the byte tokenizer.
LLAMA3: dict[str, DecoderConfig] = {
    "tiny": _llama3(layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, factor=4.0, tied=False,
                    vocab=320, before=256, length=1024),
    "1b": _llama3(layers=16, embed=2048, mlp=8192, heads=32, head_dim=64, factor=32.0, tied=True),
    "3b": _llama3(layers=28, embed=3072, mlp=8192, heads=24, factor=32.0, tied=True),
    "8b": _llama3(layers=32, embed=4096, mlp=14_336, heads=32, factor=8.0, tied=False),
    "70b": _llama3(layers=80, embed=8192, mlp=28_672, heads=64, factor=8.0, tied=False),
    "405b": _llama3(layers=126, embed=16_384, mlp=53_248, heads=128, factor=8.0, tied=False),
}  # fmt: skip

# Defaults of transformers' LlamaConfig; None is worked out from the others.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
# Read below; and `pretraining_tp`, which once split sums without changing them.
_OTHERS = ("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "pretraining_tp")


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""
    file = ConfigFile("Llama 3", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    fill_heads(file, numbers)
    return file.decoder(
        rope_global=file.one_rope(),
        query_scale=numbers["head_dim"] ** -0.5,
        tied_head=file.flag("tie_word_embeddings", False),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        **numbers_to_hf(config),
        **rope_to_hf(config.rope_global),
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


FAMILY = Family(
    title="Llama 3",
    architecture="LlamaForCausalLM",
    model_types=("llama",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=by_head_dim,
)
