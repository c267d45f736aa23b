"""Ministral 3: spec, the published sizes (Mistral AI, 2025) and the spellings of `config.json`; no jax."""

# ruff: noqa: D102 - the methods are those of `Fields`

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.attention import QueryTemperature
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.rope import Rope, Yarn
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, Heads, SharedRope, TiedHead, UniformWindow
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Ministral3(Model):
    """Ministral 3, text only (Mistral AI, 2025): a Mistral with YaRN, whose queries are sharper at far positions.

    Attributes:
        size: Published size, or "tiny": 4 layers, 0.8 million parameters, for a laptop.
    """

    size: Literal["tiny", "3b", "8b", "14b"] = attrs.field(kw_only=False)


def _rope(original: int, theta: float = 1e6) -> dict[str, Any]:
    scaling = Yarn(original_max_position_embeddings=original, attention_factor=1.0)
    temperature = QueryTemperature(beta=0.1, length=original)
    return {"rope": Rope(theta=theta, factor=16.0, scaling=scaling), "attention.query_temperature": temperature}


_size = partial(decoder, norm_eps=1e-5)
_large = partial(_size, heads=32, kv_heads=8, head_dim=128, vocab=131_072, length=262_144, **_rope(16_384))

# The text decoders as their published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
MINISTRAL3 = {
    "tiny": _size(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, vocab=320, length=1024,
                  tied_head=True, **_rope(64)),
    "3b": _large(layers=26, embed=3072, mlp=9216, tied_head=True),
    "8b": _large(layers=34, embed=4096, mlp=14_336, tied_head=False),
    "14b": _large(layers=40, embed=5120, mlp=16_384, tied_head=False, **_rope(16_384, theta=1e9)),
}  # fmt: skip

BETA = "llama_4_scaling_beta"
IGNORED = (BETA, "max_position_embeddings")
"""Entries of `rope_parameters` that are no rotary positions."""
_DEFAULT = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


class Temperature(Fields):
    """The factor of queries by position, among the entries of YaRN."""

    decides: ClassVar[tuple[str, ...]] = ("attention.query_temperature",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        entry = file.fields.get("rope_parameters") or file.fields.get("rope_scaling") or {}
        numbers: dict[str, Any] = {name: entry.get(name) for name in (BETA, "original_max_position_embeddings")}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                file.problems.append(f"rope_parameters: {name}: expected a number above 0, got {value!r}")
                return {}
        beta, length = numbers.values()
        return {"attention.query_temperature": file.part(QueryTemperature, beta=float(beta), length=int(length))}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        scaling, temperature = config.rope_global.scaling, config.attention.query_temperature
        length = scaling.original_max_position_embeddings if isinstance(scaling, Yarn) else 16_384
        return {
            "attention.query_temperature": QueryTemperature(
                beta=temperature.beta if temperature else 0.1, length=length
            )
        }


class NestedRope(SharedRope):
    """YaRN, written with the factor of queries by position in one object."""

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return nested(super().write(config), config)


def nested(rope: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """`rope_parameters` of written rotary positions and the factor of queries."""
    temperature = config.attention.query_temperature
    assert temperature is not None  # or the decoder is refused
    scaling = {"rope_type": "default", **(rope["rope_scaling"] or {})}
    parameters = {"original_max_position_embeddings": temperature.length, BETA: temperature.beta}
    return {"rope_parameters": {**scaling, "rope_theta": rope["rope_theta"], **parameters}}


def _prepared(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with transformers' rotary positions where a file has none."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling")
    return fields if parameters else {**fields, "rope_parameters": _DEFAULT}


FAMILY = register(
    Family(
        title="Ministral 3",
        spec=Ministral3,
        sizes=MINISTRAL3,
        architecture="Ministral3ForCausalLM",
        classifier="Ministral3ForSequenceClassification",
        model_types=("ministral3",),
        wrappers=("mistral3",),
        defaults=transformers_defaults(layers=34, embed=4096, mlp=14_336, heads=32, kv_heads=8, head_dim=128,
                                       vocab=131_072, length=262_144, norm_eps=1e-5),
        fixed={"attention_dropout": 0.0},
        layers=LayerFields(attention_bias=None),
        fields=(
            Heads(),
            UniformWindow(default=None),
            NestedRope(ignored=IGNORED),
            Temperature(),
            TiedHead(),
        ),
        prepare=_prepared,
    )
)  # fmt: skip
