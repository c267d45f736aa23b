"""OLMo 3: the published sizes (OLMo Team 2025, arXiv:2512.13961), and its spelling of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, Rope, Yarn, local_then_global
from nnxdsl.models.families.hf_config import (
    NUMBERS,
    USUAL,
    ConfigFile,
    Family,
    fill_heads,
    layer_types,
    numbers_to_hf,
    rope_to_hf,
)

# What tells an OLMo 3 from other decoders.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "mla": None,
    "moe": None,
    "norms": "post",
    "query_key_norm": "row",
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _olmo3(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, head_dim: int = 128, window: int = 4096,
    before: int = 8192, vocab: int = 100_278, length: int = 65_536,
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
        pattern=local_then_global(4),
        rope_local=Rope(theta=500_000.0),
        rope_global=Rope(
            theta=500_000.0,
            factor=8.0,
            scaling=Yarn(original_max_position_embeddings=before, attention_factor=1.2079441541679836),
        ),
        query_scale=head_dim**-0.5,
        max_length=length,
        tied_head=False,
        **_CHOICES,
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
OLMO3: dict[str, DecoderConfig] = {
    "tiny": _olmo3(layers=6, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, window=64, before=128, vocab=320,
                   length=1024),
    "7b": _olmo3(layers=32, embed=4096, mlp=11_008, heads=32, kv_heads=32),
    "32b": _olmo3(layers=64, embed=5120, mlp=27_648, heads=40, kv_heads=8),
}  # fmt: skip

# Defaults of transformers' Olmo3Config; None is worked out from the others.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
_OTHERS = ("layer_types", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters")


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads all spellings of RoPE: one for all layers, which is stretched on the global ones alone; or two."""
    file = ConfigFile("OLMo 3", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    fill_heads(file, numbers)
    local, everywhere = _rope(file)
    return file.decoder(
        window=numbers["sliding_window"],
        pattern=file.pattern(numbers["num_hidden_layers"], local_then_global(4)),
        rope_local=local,
        rope_global=everywhere,
        query_scale=numbers["head_dim"] ** -0.5,
        tied_head=file.flag("tie_word_embeddings", False),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _rope(file: ConfigFile) -> tuple[Rope, Rope]:
    """(local, global)."""
    given = file.fields.get("rope_parameters")
    if isinstance(given, Mapping) and set(given) <= {"sliding_attention", "full_attention"}:
        return file.ropes((500_000.0, 500_000.0))
    rope = file.one_rope(500_000.0)
    return Rope(theta=rope.theta), rope


def _write(config: DecoderConfig) -> dict[str, Any]:
    scaling = rope_to_hf(config.rope_global)["rope_scaling"]
    return {
        "model_type": "olmo3",
        **numbers_to_hf(config),
        "sliding_window": config.window or _DEFAULTS["sliding_window"],  # without local layers it has no effect
        "layer_types": layer_types(config),
        **rope_to_hf(config.rope_global),
        "rope_parameters": {  # transformers 5 reads the older fields for the global layers alone
            "sliding_attention": {"rope_type": "default", "rope_theta": config.rope_global.theta},
            "full_attention": {"rope_type": "default", "rope_theta": config.rope_global.theta, **(scaling or {})},
        },
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


FAMILY = Family(
    title="OLMo 3",
    architecture="Olmo3ForCausalLM",
    model_types=("olmo3",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=lambda config: {
        "query_scale": config.head_dim**-0.5,
        "rope_local": Rope(theta=config.rope_global.theta),
    },
)
