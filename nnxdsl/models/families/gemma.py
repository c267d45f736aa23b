"""Gemma: the published sizes (Gemma Team, arXiv:2403.08295), and its spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, Rope
from nnxdsl.models.families.hf_config import NUMBERS, USUAL, ConfigFile, Family, by_head_dim, numbers_to_hf, rope_to_hf

# What tells a Gemma from other decoders.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "rope_local": None,
    "window": None,
    "pattern": ("global",),
    "mla": None,
    "moe": None,
    "norm_scale": "zero_centred",
    "gated_deltanet": None,
    "activation": "gelu_tanh",
    "scale_embedding": True,
    "tied_head": True,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _gemma(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, head_dim: int = 256, vocab: int = 256_000,
    length: int = 8192,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_global=Rope(theta=10_000.0),
        query_scale=head_dim**-0.5,
        max_length=length,
        **_CHOICES,
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GEMMA: dict[str, DecoderConfig] = {
    "tiny": _gemma(layers=5, embed=128, mlp=384, heads=4, kv_heads=1, head_dim=32, vocab=320, length=1024),
    "2b": _gemma(layers=18, embed=2048, mlp=16_384, heads=8, kv_heads=1),
    "7b": _gemma(layers=28, embed=3072, mlp=24_576, heads=16, kv_heads=16),
}

# Defaults of transformers' GemmaConfig.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
}
_ACTIVATION = "gelu_pytorch_tanh"
_OTHERS = ("rope_theta", "rope_scaling", "rope_parameters", "hidden_activation", "hidden_act")


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE and of the activation: the first files say "gelu" and mean its approximation."""
    file = ConfigFile("Gemma", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    activation = fields.get("hidden_activation") or fields.get("hidden_act", _ACTIVATION)
    if activation != _ACTIVATION:
        file.problems.append(
            f"hidden_act: only {_ACTIVATION!r} is implemented, got {activation!r}; if the model was trained with "
            f"the approximation, as Google's were, say so in hidden_activation"
        )
    return file.decoder(
        rope_global=file.one_rope(),
        query_scale=numbers["head_dim"] ** -0.5,
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gemma",
        **numbers_to_hf(config),
        **rope_to_hf(config.rope_global),
        "hidden_act": _ACTIVATION,
        **_FIXED,
    }


FAMILY = Family(
    title="Gemma",
    architecture="GemmaForCausalLM",
    model_types=("gemma",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=by_head_dim,
)
