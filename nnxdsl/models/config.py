"""A decoder of the Gemma 3 kind as numbers: the published sizes, and the Hub's `config.json` in and out; no jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from nnxdsl.spec.errors import WeightsError


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The numbers that fix a decoder's mathematics (Gemma 3 technical report, arXiv:2503.19786).

    Layers come in periods of `window_pattern`: all but the last of a period attend over a sliding window, the last
    over everything. Layers that fill no whole period are the tail.

    Attributes:
        vocab_size: rows of the tied embedding.
        embed_dim: width of the residual stream.
        mlp_dim: width of the gated MLP.
        num_layers: all layers, whole periods and tail.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of one head; even.
        window: a local layer sees itself and `window - 1` tokens before.
        window_pattern: layers of one period.
        rope_base_local: RoPE base wavelength of the local layers.
        rope_base_global: RoPE base wavelength of the global layers.
        rope_scale: positions of the global layers are divided by it (linear scaling).
        query_scale: attention scores are multiplied by it (the Hub's `query_pre_attn_scalar ** -0.5`).
        norm_eps: added to the mean square in every RMSNorm.
        max_length: positions that the model was made for.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    window_pattern: int = 6
    rope_base_local: float = 10_000.0
    rope_base_global: float = 1_000_000.0
    rope_scale: float = 1.0
    query_scale: float
    norm_eps: float = 1e-6
    max_length: int

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(DecoderConfig):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be above 0, got {getattr(self, field.name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE turns its halves against each other")

    @property
    def periods(self) -> int:
        """Whole periods: the length of the scan over layers."""
        return self.num_layers // self.window_pattern

    @property
    def tail_layers(self) -> int:
        """Layers after the last whole period; all of them local."""
        return self.num_layers % self.window_pattern

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0 in the model or in its period, attends over everything."""
        return (layer + 1) % self.window_pattern == 0


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
        rope_scale=rope_scale,
        query_scale=scalar**-0.5,
        max_length=length,
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
_ROPE_FIELDS = ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters")
_PATTERN_FIELDS = ("sliding_window_pattern", "_sliding_window_pattern", "layer_types")

# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "tie_word_embeddings": True,
}

# Fields that say nothing of the forward pass: how weights were stored and initialised, how text is generated,
# token ids (the tokenizer's business), and what transformers writes about itself.
_WITHOUT_EFFECT = frozenset(
    [
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "hidden_act",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hub `config.json` of the Gemma 3 family.

    Understood are the flat form (`model_type` "gemma3_text"), the multimodal form, whose `text_config` is read and
    whose vision part is left alone, and both spellings of RoPE (`rope_theta`, `rope_local_base_freq` and
    `rope_scaling`; or transformers 5's `rope_parameters`) and of the layers' kinds (`sliding_window_pattern`;
    or `layer_types`). What a file leaves out has transformers' default.

    Args:
        config: the parsed file.

    Returns:
        The decoder's numbers.

    Raises:
        WeightsError: another model, a field of a wrong type, or a field that could change the mathematics and is
            not understood; every such field at once.
    """
    kind = config.get("model_type")
    if kind == "gemma3":
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise WeightsError("text_config: a gemma3 config.json holds the text decoder there; it is missing")
        if config.get("tie_word_embeddings", True) is not True:
            text = {**text, "tie_word_embeddings": config["tie_word_embeddings"]}
        return _from_text({"model_type": "gemma3_text", **text})
    if kind == "gemma3_text":
        return _from_text(config)
    raise WeightsError(f"model_type: expected 'gemma3_text' or 'gemma3', got {kind!r}")


def to_hf(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` that transformers 4.50 or newer reads as the same model.

    Args:
        config: the decoder's numbers.
        dtype: the name of the dtype in which the weights are stored.

    Returns:
        A dictionary of JSON values; `from_hf` of it is `config` again.
    """
    scaling = None if config.rope_scale == 1.0 else {"rope_type": "linear", "factor": config.rope_scale}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "sliding_window": config.window,
        "sliding_window_pattern": config.window_pattern,
        "layer_types": [
            "full_attention" if config.is_global(layer) else "sliding_attention" for layer in range(config.num_layers)
        ],
        "rope_theta": config.rope_base_global,
        "rope_local_base_freq": config.rope_base_local,
        "rope_scaling": scaling,
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        **_FIXED,
    }


def _from_text(config: Mapping[str, Any]) -> DecoderConfig:
    problems: list[str] = []
    numbers = dict(_DEFAULTS)
    known = {*_DEFAULTS, *_ROPE_FIELDS, *_PATTERN_FIELDS, *_FIXED, *_WITHOUT_EFFECT}
    for name, value in config.items():
        if name in _DEFAULTS:
            wanted = (int, float) if name == "rms_norm_eps" else int
            if isinstance(value, bool) or not isinstance(value, wanted) or value <= 0:
                what = "a number" if name == "rms_norm_eps" else "an integer"
                problems.append(f"{name}: expected {what} above 0, got {value!r}")
            else:
                numbers[name] = value
        elif name in _FIXED and (value or None) != (_FIXED[name] or None):
            problems.append(f"{name}: only {_FIXED[name]!r} is implemented, got {value!r}")
        elif name not in known and value not in (None, False, [], {}):
            # Something that is switched off cannot matter; anything else might.
            problems.append(f"{name}={value!r}: not understood, and it could change the mathematics")
    pattern = _pattern(config, numbers["num_hidden_layers"], problems)
    local_base, global_base, scale = _rope(config, problems)
    if problems:
        raise WeightsError("\n  ".join(["config.json is not a Gemma 3 that can be read:", *problems]))
    try:
        return DecoderConfig(
            vocab_size=numbers["vocab_size"],
            embed_dim=numbers["hidden_size"],
            mlp_dim=numbers["intermediate_size"],
            num_layers=numbers["num_hidden_layers"],
            num_heads=numbers["num_attention_heads"],
            num_kv_heads=numbers["num_key_value_heads"],
            head_dim=numbers["head_dim"],
            window=numbers["sliding_window"],
            window_pattern=pattern,
            rope_base_local=local_base,
            rope_base_global=global_base,
            rope_scale=scale,
            query_scale=numbers["query_pre_attn_scalar"] ** -0.5,
            norm_eps=float(numbers["rms_norm_eps"]),
            max_length=numbers["max_position_embeddings"],
        )
    except ValueError as error:
        raise WeightsError(f"config.json is not a Gemma 3 that can be read: {error}") from None


def _pattern(config: Mapping[str, Any], layers: int, problems: list[str]) -> int:
    """Layers in a period, from whichever spelling is there; of both, `layer_types` decides, as in transformers."""
    named = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    if isinstance(named, bool) or not isinstance(named, int) or named < 1:
        problems.append(f"sliding_window_pattern: expected an integer above 0, got {named!r}")
        return 6
    kinds: Sequence[str] | None = config.get("layer_types")
    if kinds is None:
        return named
    pattern = kinds.index("full_attention") + 1 if "full_attention" in kinds else max(named, layers + 1)
    wanted = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    if list(kinds) != wanted:
        problems.append(
            f"layer_types: expected {layers} layers in periods of {pattern}, the last of each 'full_attention' and the "
            f"others 'sliding_attention', got {list(kinds)!r}"
        )
    return pattern


def _rope(config: Mapping[str, Any], problems: list[str]) -> tuple[float, float, float]:
    """(local base, global base, global scale) from the spelling of transformers 4 or 5."""
    new = config.get("rope_parameters")
    if new is not None:
        if not isinstance(new, Mapping) or not set(new) <= {"sliding_attention", "full_attention"}:
            problems.append(f"rope_parameters: expected entries 'sliding_attention' and 'full_attention', got {new!r}")
            return 1.0, 1.0, 1.0
        local, everything = dict(new.get("sliding_attention") or {}), dict(new.get("full_attention") or {})
        where = ("rope_parameters.sliding_attention", "rope_parameters.full_attention")
    else:
        local, everything = {}, dict(config.get("rope_scaling") or {})
        where = ("rope_local_base_freq", "rope_scaling")
    local.setdefault("rope_theta", config.get("rope_local_base_freq", 10_000.0))
    everything.setdefault("rope_theta", config.get("rope_theta", 1_000_000.0))
    local_base, local_scale = _rope_entry(local, where[0], problems)
    global_base, global_scale = _rope_entry(everything, where[1], problems)
    if local_scale != 1.0:
        problems.append(f"{where[0]}: scaling of local layers is not implemented, got factor={local_scale!r}")
    return local_base, global_base, global_scale


def _rope_entry(entry: dict[str, Any], where: str, problems: list[str]) -> tuple[float, float]:
    kind = entry.pop("rope_type", None) or entry.pop("type", None) or "default"
    entry.pop("type", None)  # older files carry both names
    base, factor = entry.pop("rope_theta"), entry.pop("factor", 1.0)
    if kind not in ("default", "linear"):
        problems.append(f"{where}: only rope_type 'default' and 'linear' are implemented, got {kind!r}")
        return 1.0, 1.0
    for name, value in (("rope_theta", base), ("factor", factor)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            problems.append(f"{where}: {name}: expected a number above 0, got {value!r}")
            return 1.0, 1.0
    # With rope_type "default" transformers reads no factor, so neither do these readers.
    extra = {name: value for name, value in entry.items() if value is not None}
    if extra:
        problems.append(f"{where}: not understood: {extra!r}")
    return float(base), float(factor) if kind == "linear" else 1.0
