"""Gemma 3: the published sizes (Gemma Team, arXiv:2503.19786), and its spellings of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.errors import WeightsError
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind, Rope, local_then_global
from nnxdsl.models.families.hf_config import NUMBERS, USUAL, ConfigFile, Family, layer_types, numbers_to_hf, rope_to_hf

# What tells a Gemma 3 from other decoders.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "mla": None,
    "moe": None,
    "norms": "sandwich",
    "norm_scale": "zero_centred",
    "query_key_norm": "head",
    "gated_deltanet": None,
    "activation": "gelu_tanh",
    "scale_embedding": True,
    "tied_head": True,
}


def _gemma3(
    *, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, head_dim: int = 256, window: int,
    scalar: int = 256, rope_scale: float = 1.0, vocab: int, length: int,
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
        rope_global=Rope(theta=1_000_000.0, factor=rope_scale),
        query_scale=scalar**-0.5,
        max_length=length,
        **_CHOICES,
    )


# The text decoders as their published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GEMMA3: dict[str, DecoderConfig] = {
    "tiny": _gemma3(layers=6, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, window=64, scalar=32,
                    vocab=320, length=1024),
    "270m": _gemma3(layers=18, embed=640, mlp=2048, heads=4, kv_heads=1, window=512, vocab=262_144, length=32_768),
    "1b": _gemma3(layers=26, embed=1152, mlp=6912, heads=4, kv_heads=1, window=512, vocab=262_144, length=32_768),
    "4b": _gemma3(layers=34, embed=2560, mlp=10_240, heads=8, kv_heads=4, window=1024, rope_scale=8.0,
                  vocab=262_208, length=131_072),
    "12b": _gemma3(layers=48, embed=3840, mlp=15_360, heads=16, kv_heads=8, window=1024, rope_scale=8.0,
                   vocab=262_208, length=131_072),
    "27b": _gemma3(layers=62, embed=5376, mlp=21_504, heads=32, kv_heads=16, head_dim=128, scalar=168, window=1024,
                   rope_scale=8.0, vocab=262_208, length=131_072),
}  # fmt: skip

# Defaults of transformers' Gemma3TextConfig: the published 4b, 12b and 27b files leave out what equals them.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_bidirectional_attention": False,
    "tie_word_embeddings": True,
}

# Read below; and `hidden_act`, which transformers does not read here.
_OTHERS = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "layer_types",
    "rope_theta",
    "rope_local_base_freq",
    "rope_scaling",
    "rope_parameters",
    "hidden_act",
)


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads the flat form and the multimodal one, whose `text_config` is read and whose vision part is left alone.

    Understood are both spellings of RoPE (`rope_theta`, `rope_local_base_freq` and `rope_scaling`; or transformers 5's
    `rope_parameters`) and of the layers' kinds (`sliding_window_pattern`; or `layer_types`).
    """
    if fields["model_type"] == "gemma3":
        text = fields.get("text_config")
        if not isinstance(text, Mapping):
            raise WeightsError("text_config: a gemma3 config.json holds the text decoder there; it is missing")
        tied = {name: fields[name] for name in ("tie_word_embeddings",) if fields.get(name, True) is not True}
        fields = {**text, **tied}
    file = ConfigFile("Gemma 3", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    local, everything = _rope(file)
    return file.decoder(
        window=numbers["sliding_window"],
        pattern=_pattern(file, numbers["num_hidden_layers"]),
        rope_local=local,
        rope_global=everything,
        query_scale=numbers["query_pre_attn_scalar"] ** -0.5,
        attention_soft_cap=file.soft_cap("attn_logit_softcapping", None),
        logit_soft_cap=file.soft_cap("final_logit_softcapping", None),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        **numbers_to_hf(config),
        "sliding_window": config.window or _DEFAULTS["sliding_window"],  # without local layers it has no effect
        "layer_types": layer_types(config),
        **_period(config.pattern),
        "rope_local_base_freq": (config.rope_local or config.rope_global).theta,
        **rope_to_hf(config.rope_global),
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        **_FIXED,
    }


def _pattern(file: ConfigFile, layers: int) -> tuple[LayerKind, ...]:
    """A period, from whichever spelling is there; of both, `layer_types` decides, as in transformers."""
    name = "sliding_window_pattern" if file.fields.get("sliding_window_pattern") else "_sliding_window_pattern"
    named = file.count(name, 6, least=1) if file.fields.get(name) else 6
    return file.pattern(layers, local_then_global(named))


def _period(pattern: tuple[LayerKind, ...]) -> dict[str, int]:
    """The older spelling of the layers' kinds, which can say no others than these."""
    return {"sliding_window_pattern": len(pattern)} if pattern == local_then_global(len(pattern)) else {}


def _rope(file: ConfigFile) -> tuple[Rope, Rope]:
    """(local, global) from the spelling of transformers 4 or 5."""
    fields = file.fields
    bases = fields.get("rope_local_base_freq", 10_000.0), fields.get("rope_theta", 1_000_000.0)
    if fields.get("rope_parameters") is not None:
        where, (local, everything) = "rope_parameters.sliding_attention", file.ropes(bases)
    else:
        where, local = "rope_local_base_freq", file.rope(None, bases[0], "rope_local_base_freq")
        everything = file.rope(fields.get("rope_scaling"), bases[1], "rope_scaling")
    if local.factor != 1.0:  # which the older spelling could not say
        file.problems.append(f"{where}: scaling of local layers is not implemented, got factor={local.factor!r}")
    return local, everything


FAMILY = Family(
    title="Gemma 3",
    architecture="Gemma3ForCausalLM",
    model_types=("gemma3_text", "gemma3"),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=lambda config: {"rope_local": Rope(theta=(config.rope_local or config.rope_global).theta)},
)
