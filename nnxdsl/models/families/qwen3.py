"""Qwen3: spec, the published dense sizes (Qwen Team, arXiv:2505.09388) and `config.json`; no jax."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, LateWindows, SharedRope, TiedHead
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Qwen3(Model):
    """Qwen3, its dense models (Qwen Team 2025, arXiv:2505.09388).

    QK norms.

    Attributes:
        size: Published size, or "tiny": 5 layers, 1.0 million parameters, for a laptop.
    """

    size: Literal["tiny", "0.6b", "1.7b", "4b", "8b", "14b", "32b"] = attrs.field(kw_only=False)


_CHOICES: dict[str, Any] = {"attention.query_key_norm": "head"}
_size = partial(decoder, head_dim=128, rope=Rope(theta=1e6), tied_head=False, vocab=151_936, length=40_960, **_CHOICES)

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
QWEN3 = {
    "tiny": _size(
        layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, tied_head=True, vocab=320, length=1024
    ),
    "0.6b": _size(layers=28, embed=1024, mlp=3072, heads=16, kv_heads=8, tied_head=True),
    "1.7b": _size(layers=28, embed=2048, mlp=6144, heads=16, kv_heads=8, tied_head=True),
    "4b": _size(layers=36, embed=2560, mlp=9728, heads=32, kv_heads=8, tied_head=True),
    "8b": _size(layers=36, embed=4096, mlp=12_288, heads=32, kv_heads=8),
    "14b": _size(layers=40, embed=5120, mlp=17_408, heads=40, kv_heads=8),
    "32b": _size(layers=64, embed=5120, mlp=25_600, heads=64, kv_heads=8),
}

_DEFAULTS = transformers_defaults(layers=32, embed=4096, mlp=22_016, heads=32, kv_heads=32, head_dim=128,
                                  vocab=151_936, length=32_768)  # fmt: skip

FAMILY = register(
    Family(
        title="Qwen3",
        spec=Qwen3,
        sizes=QWEN3,
        architecture="Qwen3ForCausalLM",
        classifier="Qwen3ForSequenceClassification",
        model_types=("qwen3",),
        choices=_CHOICES,
        defaults=_DEFAULTS,
        fixed={"attention_dropout": 0.0},
        fields=(Heads(), LateWindows(), SharedRope(), TiedHead()),
    )
)
