"""Granite 3, dense: spec, the published sizes (IBM, 2025) and the spellings of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, Heads, SharedRope, TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Granite(Model):
    """Granite 3.3, dense (IBM, 2025): a Llama with multipliers of embeddings, residuals, scores and logits.

    Attributes:
        size: Published size, or "tiny": 4 layers, 0.8 million parameters, for a laptop.
    """

    size: Literal["tiny", "3.3-2b", "3.3-8b"] = attrs.field(kw_only=False)


def _size(*, logits_scaling: float, **numbers: Any) -> DecoderConfig:
    multipliers = {"embedding.multiplier": 12.0, "head.logits_scaling": logits_scaling}
    return decoder(residual_multiplier=0.22, norm_eps=1e-5, rope=Rope(theta=1e7), **multipliers, **numbers)


_large = partial(_size, layers=40, heads=32, kv_heads=8, vocab=49_159, length=131_072)

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GRANITE = {
    "tiny": _size(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, query_scale=1 / 32,
                  logits_scaling=4.0, vocab=320, length=1024),
    "3.3-2b": _large(embed=2048, mlp=8192, head_dim=64, query_scale=1 / 64, logits_scaling=8.0),
    "3.3-8b": _large(embed=4096, mlp=12_800, head_dim=128, query_scale=1 / 128, logits_scaling=16.0),
}  # fmt: skip

_NUMBERS = {
    "attention_multiplier": "attention.query_scale",
    "embedding_multiplier": "embedding.multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "head.logits_scaling",
}


class _Multipliers(Fields):
    """Factors of attention scores, embeddings, residuals and logits; 1 where a file has none."""

    names: ClassVar[tuple[str, ...]] = tuple(_NUMBERS)
    decides: ClassVar[tuple[str, ...]] = tuple(_NUMBERS.values())

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {ours: file.number(theirs, 1.0) for theirs, ours in _NUMBERS.items()}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {theirs: attrgetter(ours)(config) for theirs, ours in _NUMBERS.items()}


class _Heads(Heads):
    """Heads, whose width alone follows from others."""

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        return {}


FAMILY = register(
    Family(
        title="Granite",
        spec=Granite,
        sizes=GRANITE,
        architecture="GraniteForCausalLM",
        model_types=("granite",),
        defaults=transformers_defaults(layers=32, embed=4096, mlp=11_008, heads=32, kv_heads=None, head_dim=None,
                                       vocab=32_000, length=2048),
        fixed={"attention_dropout": 0.0},
        layers=LayerFields(mlp_bias=True),
        fields=(_Heads(), _Multipliers(), SharedRope(), TiedHead()),
        is_general=True,
    )
)  # fmt: skip
