"""Gemma 3: spec, the published sizes (Gemma Team, arXiv:2503.19786) and the spellings of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import local_then_global
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, ScaledQueries, SoftCaps, WindowPattern
from nnxdsl.models.families.gemma import CHOICES
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.hf_rope import NAMES, read_entry, read_ropes, rope_to_hf
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Gemma3(Model):
    """Gemma 3, text only (Gemma Team 2025, arXiv:2503.19786).

    Five layers of six have a sliding window and a RoPE theta of their own; QK norms.

    Attributes:
        size: Published size, or "tiny": 6 layers, 1.2 million parameters, for a laptop.
    """

    size: Literal["tiny", "270m", "1b", "4b", "12b", "27b"] = attrs.field(kw_only=False)


_CHOICES: dict[str, Any] = {**CHOICES, "norm.placement": "sandwich", "attention.query_key_norm": "head"}
_size = partial(decoder, head_dim=256, scalar=256, pattern=local_then_global(6), rope_local=Rope(theta=10_000.0),
                rope=Rope(theta=1e6), **_CHOICES)  # fmt: skip
_LONG = Rope(theta=1e6, factor=8.0)

# The text decoders as their published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GEMMA3 = {
    "tiny": _size(layers=6, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, window=64, scalar=32, vocab=320,
                  length=1024),
    "270m": _size(layers=18, embed=640, mlp=2048, heads=4, kv_heads=1, window=512, vocab=262_144, length=32_768),
    "1b": _size(layers=26, embed=1152, mlp=6912, heads=4, kv_heads=1, window=512, vocab=262_144, length=32_768),
    "4b": _size(layers=34, embed=2560, mlp=10_240, heads=8, kv_heads=4, window=1024, rope=_LONG, vocab=262_208,
                length=131_072),
    "12b": _size(layers=48, embed=3840, mlp=15_360, heads=16, kv_heads=8, window=1024, rope=_LONG, vocab=262_208,
                 length=131_072),
    "27b": _size(layers=62, embed=5376, mlp=21_504, heads=32, kv_heads=16, head_dim=128, scalar=168, window=1024,
                 rope=_LONG, vocab=262_208, length=131_072),
}  # fmt: skip


class _Windows(WindowPattern):
    """Both spellings of the layers' kinds; of both, `layer_types` decides, as in transformers."""

    names: ClassVar[tuple[str, ...]] = ("layer_types", "sliding_window_pattern", "_sliding_window_pattern")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        name = "sliding_window_pattern" if file.fields.get("sliding_window_pattern") else "_sliding_window_pattern"
        period = file.count(name, 6, least=1) if file.fields.get(name) else 6
        return {"window": file.numbers["sliding_window"], "layers.pattern": file.pattern(local_then_global(period))}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        period = len(config.layers.pattern)  # the older spelling has no others than these
        older = {"sliding_window_pattern": period} if config.layers.pattern == local_then_global(period) else {}
        return super().write(config) | older


class _Ropes(Fields):
    """Rotary positions of local and global layers, in the spelling of transformers 4 or 5."""

    names: ClassVar[tuple[str, ...]] = (*NAMES, "rope_local_base_freq")
    decides: ClassVar[tuple[str, ...]] = ("rope_global", "rope_local")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        fields = file.fields
        thetas = fields.get("rope_local_base_freq", 10_000.0), fields.get("rope_theta", 1_000_000.0)
        if fields.get("rope_parameters") is not None:
            name, (local, everywhere) = "rope_parameters.sliding_attention", read_ropes(file, thetas)
        else:
            name, local = "rope_local_base_freq", read_entry(file, None, thetas[0], "rope_local_base_freq")
            everywhere = read_entry(file, fields.get("rope_scaling"), thetas[1], "rope_scaling")
        if local.factor != 1.0:  # which the older spelling cannot have
            file.problems.append(f"{name}: scaling of local layers is not implemented, got factor={local.factor!r}")
        return {"rope_local": local, "rope_global": everywhere}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        local = config.rope_local or config.rope_global
        return {"rope_local_base_freq": local.theta, **rope_to_hf(config.rope_global)}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        return {"rope_local": Rope(theta=(config.rope_local or config.rope_global).theta)}


# the published 4b, 12b and 27b files leave out what equals them
_DEFAULTS = transformers_defaults(layers=26, embed=2304, mlp=9216, heads=8, kv_heads=4, head_dim=256, vocab=262_208,
                                  length=131_072, query_pre_attn_scalar=256, sliding_window=4096)  # fmt: skip

FAMILY = register(
    Family(
        title="Gemma 3",
        spec=Gemma3,
        sizes=GEMMA3,
        architecture="Gemma3ForCausalLM",
        classifier="Gemma3TextForSequenceClassification",
        model_types=("gemma3_text",),
        wrappers=("gemma3",),
        choices=_CHOICES,
        defaults=_DEFAULTS,
        fixed={
            "attention_dropout": 0.0,
            "use_bidirectional_attention": False,
            "tie_word_embeddings": True,
        },
        ignored=("hidden_act",),  # not read by transformers
        layers=LayerFields(activation=("hidden_activation",)),
        fields=(
            _Windows(pattern=local_then_global(6), default=4096),
            _Ropes(),
            ScaledQueries(),
            SoftCaps(),
        ),
    )
)
