"""Mistral: the published sizes (Jiang et al. 2023, arXiv:2310.06825), and its spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, LayerKind, Rope
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

# What tells a Mistral from other decoders; its layers all have a window, or none has.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "mla": None,
    "moe": None,
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def pattern_of(window: int | None) -> tuple[LayerKind, ...]:
    """The period of layers that all have a window, or of which none has."""
    return ("global",) if window is None else ("local",)


def _mistral(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int = 8, head_dim: int = 128, base: float,
    window: int | None = None, vocab: int, length: int,
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
        pattern=pattern_of(window),
        rope_global=Rope(theta=base),
        query_scale=head_dim**-0.5,
        norm_eps=1e-5,
        max_length=length,
        tied_head=False,
        **_CHOICES,
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer. "7b" is version 0.3;
# the first version, "7b-v0.1", is the one with a window.
MISTRAL: dict[str, DecoderConfig] = {
    "tiny": _mistral(layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, base=10_000.0, window=64,
                     vocab=320, length=1024),
    "7b-v0.1": _mistral(layers=32, embed=4096, mlp=14_336, heads=32, base=10_000.0, window=4096, vocab=32_000,
                        length=32_768),
    "7b": _mistral(layers=32, embed=4096, mlp=14_336, heads=32, base=1e6, vocab=32_768, length=32_768),
    "nemo-12b": _mistral(layers=40, embed=5120, mlp=14_336, heads=32, base=1e6, vocab=131_072, length=131_072),
    "small-24b": _mistral(layers=40, embed=5120, mlp=32_768, heads=32, base=1e8, vocab=131_072, length=32_768),
}  # fmt: skip

# Defaults of transformers' MistralConfig; None is worked out from the others.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0}
_OTHERS = ("sliding_window", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters")


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE; a `sliding_window` of null is none, a file without the field has 4,096 tokens."""
    file = ConfigFile("Mistral", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    fill_heads(file, numbers)
    window = file.window(4096)
    return file.decoder(
        window=window,
        pattern=pattern_of(window),
        rope_global=file.one_rope(),
        query_scale=numbers["head_dim"] ** -0.5,
        tied_head=file.flag("tie_word_embeddings", False),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        **numbers_to_hf(config),
        "sliding_window": config.window,
        **rope_to_hf(config.rope_global),
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


FAMILY = Family(
    title="Mistral",
    architecture="MistralForCausalLM",
    model_types=("mistral",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=lambda config: {**by_head_dim(config), "pattern": pattern_of(config.window)},
)
