"""OLMo 3: spec, the published sizes (OLMo Team 2025, arXiv:2512.13961) and `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import local_then_global
from nnxdsl.models.config.rope import Rope, Yarn
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, SharedRope, TiedHead, WindowPattern
from nnxdsl.models.families.hf_config import KINDS, ConfigFile
from nnxdsl.models.families.hf_rope import read_rope, read_ropes, rope_to_hf
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Olmo3(Model):
    """OLMo 3 (OLMo Team 2025, arXiv:2512.13961).

    Norms after; QK norms over all heads; YaRN on the global layers.

    Attributes:
        size: Published size, or "tiny": 6 layers, 1.3 million parameters, for a laptop.
    """

    size: Literal["tiny", "7b", "32b"] = attrs.field(kw_only=False)


_CHOICES: dict[str, Any] = {"norm.placement": "post", "attention.query_key_norm": "row"}
_PATTERN = local_then_global(4)


def _size(*, original: int = 8192, **numbers: Any) -> DecoderConfig:
    scaling = Yarn(original_max_position_embeddings=original, attention_factor=1.2079441541679836)
    common: dict[str, Any] = {"head_dim": 128, "window": 4096, "vocab": 100_278, "length": 65_536}
    return decoder(
        pattern=_PATTERN,
        rope_local=Rope(theta=500_000.0),
        rope=Rope(theta=500_000.0, factor=8.0, scaling=scaling),
        tied_head=False,
        **{**_CHOICES, **common, **numbers},
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
OLMO3 = {
    "tiny": _size(layers=6, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, window=64, original=128, vocab=320,
                  length=1024),
    "7b": _size(layers=32, embed=4096, mlp=11_008, heads=32, kv_heads=32),
    "32b": _size(layers=64, embed=5120, mlp=27_648, heads=40, kv_heads=8),
}  # fmt: skip


class _Ropes(SharedRope):
    """One `rope_scaling` for all layers, which scales the global ones alone; or `rope_parameters` of both kinds."""

    decides: ClassVar[tuple[str, ...]] = ("rope_global", "rope_local")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        entries = file.fields.get("rope_parameters")
        if isinstance(entries, Mapping) and set(entries) <= set(KINDS):
            local, everywhere = read_ropes(file, (500_000.0, 500_000.0))
        else:
            everywhere = read_rope(file, 500_000.0)
            local = Rope(theta=everywhere.theta)
        return {"rope_local": local, "rope_global": everywhere}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        rope = rope_to_hf(config.rope_global)
        plain = {"rope_type": "default", "rope_theta": config.rope_global.theta}
        # transformers 5 reads the older fields for the global layers alone
        both = {"sliding_attention": plain, "full_attention": {**plain, **(rope["rope_scaling"] or {})}}
        return {**rope, "rope_parameters": both}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        return {"rope_local": Rope(theta=config.rope_global.theta)}


_DEFAULTS = transformers_defaults(layers=32, embed=4096, mlp=11_008, heads=32, kv_heads=None, head_dim=None,
                                  vocab=50_304, length=2048, norm_eps=1e-5, sliding_window=4096)  # fmt: skip

FAMILY = register(
    Family(
        title="OLMo 3",
        spec=Olmo3,
        sizes=OLMO3,
        architecture="Olmo3ForCausalLM",
        classifier="Olmo3ForSequenceClassification",
        model_types=("olmo3",),
        choices=_CHOICES,
        defaults=_DEFAULTS,
        fixed={"attention_dropout": 0.0},
        fields=(Heads(), WindowPattern(pattern=_PATTERN, default=4096), _Ropes(), TiedHead()),
    )
)
