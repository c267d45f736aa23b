"""OLMo Hybrid: spec, the published size (Ai2, 2026), `config.json` and tensor names; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig
from nnxdsl.models.config.layer_pattern import LayerKind, period_of
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, Tensors, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, Heads, PadToken, SharedRope, TiedHead
from nnxdsl.models.families.hf_config import LINEAR_KINDS, ConfigFile, layer_types
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class OlmoHybrid(Model):
    """OLMo Hybrid (Ai2, 2026): OLMo 3's attention in every fourth layer, gated DeltaNets in the others.

    The rates of the DeltaNets go to 2.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.0 million parameters, for a laptop.
    """

    size: Literal["tiny", "7b"] = attrs.field(kw_only=False)


_CHOICES: dict[str, Any] = {"norm.placement": "post", "norm.linear_placement": "pre", "attention.query_key_norm": "row"}
_DELTA: dict[str, Any] = {"projections": "single", "norm_eps": 1e-5}
_PATTERN: tuple[LayerKind, ...] = ("linear", "linear", "linear", "global")


def _size(*, heads: int, width: int, **numbers: Any) -> DecoderConfig:
    """A size, of so many heads of each kind, and DeltaNet's width of a key."""
    mixer = GatedDeltaNetConfig(
        key_heads=heads, value_heads=heads, key_head_dim=width, value_head_dim=2 * width, rate_scale=2.0, **_DELTA
    )
    return decoder(heads=heads, pattern=_PATTERN, linear_attention=mixer, tied_head=False, **_CHOICES, **numbers)


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
OLMO_HYBRID = {
    "tiny": _size(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, width=24, vocab=320, length=1024,
                  rope=Rope(theta=500_000.0)),
    "7b": _size(layers=32, embed=3840, mlp=11_008, heads=30, kv_heads=30, head_dim=128, width=96, vocab=100_352,
                length=65_536, rope=Rope(theta=500_000.0)),
}  # fmt: skip

_NUMBERS = {
    "linear_conv_kernel_dim": "conv_kernel",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
}


class _Mixers(Fields):
    """Layers with a gated DeltaNet among layers with attention, whose heads follow from those of attention."""

    names: ClassVar[tuple[str, ...]] = ("layer_types", "linear_allow_neg_eigval")
    decides: ClassVar[tuple[str, ...]] = ("layers.pattern", "linear_attention")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        numbers = dict(file.numbers)
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            numbers[name] = numbers[name] or numbers["num_attention_heads"]
        key = numbers["linear_key_head_dim"] or int(0.75 * numbers["hidden_size"] / numbers["linear_num_key_heads"])
        numbers |= {"linear_key_head_dim": key, "linear_value_head_dim": numbers["linear_value_head_dim"] or 2 * key}
        sizes = {ours: numbers[theirs] for theirs, ours in _NUMBERS.items()}
        scale = 2.0 if file.flag("linear_allow_neg_eigval", True) else 1.0
        delta = file.part(GatedDeltaNetConfig, **sizes, rate_scale=scale, **_DELTA)
        pattern = file.pattern(_PATTERN, LINEAR_KINDS)
        if "linear" not in pattern:
            file.problems.append("layer_types: expected a layer that is 'linear_attention'")
        return {"layers.pattern": pattern, "linear_attention": delta}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        delta = config.linear_attention
        assert isinstance(delta, GatedDeltaNetConfig)  # or the decoder is refused
        numbers = {theirs: getattr(delta, ours) for theirs, ours in _NUMBERS.items()}
        return {**numbers, "layer_types": layer_types(config), "linear_allow_neg_eigval": delta.rate_scale == 2.0}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        delta = config.linear_attention
        if not isinstance(delta, GatedDeltaNetConfig):
            return {"linear_attention": OLMO_HYBRID["7b"].linear_attention}
        scale = 2.0 if delta.rate_scale == 2.0 else 1.0
        return {
            "linear_attention": attrs.evolve(delta, **_DELTA, rate_scale=scale),
            "layers.pattern": period_of(config.layers.kinds),
        }


class _Rope(SharedRope):
    """Rotary positions, which transformers leaves out where `rope_theta` is null."""

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        entry = file.fields.get("rope_parameters")
        if isinstance(entry, Mapping) and entry.get("rope_theta", 1.0) is None:
            file.problems.append(
                "rope_parameters: attention without rotary positions (rope_theta null) is not implemented"
            )
        return super().read(file, decoder)


ALIASES = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""By the names that transformers' modules have, those that it writes."""


def _tensors(config: DecoderConfig, tensors: Tensors) -> Tensors:
    def named(name: str) -> str:
        stem = name.removesuffix(".weight")
        return f"{ALIASES[stem]}.weight" if stem in ALIASES else name

    return {path: attrs.evolve(one, names=tuple(map(named, one.names))) for path, one in tensors.items()}


FAMILY = register(
    Family(
        title="OLMo Hybrid",
        spec=OlmoHybrid,
        sizes=OLMO_HYBRID,
        architecture="OlmoHybridForCausalLM",
        model_types=("olmo_hybrid",),
        choices=_CHOICES,
        defaults=transformers_defaults(layers=32, embed=3840, mlp=11_008, heads=30, kv_heads=None, head_dim=None,
                                       vocab=100_352, length=65_536, linear_conv_kernel_dim=4,
                                       linear_key_head_dim=None, linear_value_head_dim=None, linear_num_key_heads=None,
                                       linear_num_value_heads=None),
        fixed={"attention_dropout": 0.0},
        ignored=("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"),
        fields=(Heads(), _Mixers(), _Rope(), TiedHead(), PadToken()),
        layer_tensors=_tensors,
        aliases=ALIASES,
        even_parts={f"linear_attn.{name}_conv1d.weight": f"linear_attn.{name}_proj.weight" for name in "qkv"},
    )
)  # fmt: skip
