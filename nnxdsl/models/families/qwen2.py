"""Qwen2 and Qwen2.5: spec, the published sizes (Qwen Team, arXiv:2412.15115) and `config.json`; no jax."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, LateWindows, SharedRope, TiedHead
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Qwen2(Model):
    """Qwen2.5 (Qwen Team 2024, arXiv:2412.15115), which is Qwen2 in all but its weights.

    Biases of queries, keys and values.

    Attributes:
        size: Published size, or "tiny": 5 layers, 1.0 million parameters, for a laptop.
    """

    size: Literal["tiny", "0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"] = attrs.field(kw_only=False)


_CHOICES: dict[str, Any] = {"attention.bias": "qkv"}
_size = partial(decoder, head_dim=128, rope=Rope(theta=1e6), tied_head=False, vocab=152_064, length=32_768, **_CHOICES)

# Qwen2.5 as the published config.json files have it; `tiny` is ours, for laptops and the byte tokenizer.
QWEN2 = {
    "tiny": _size(
        layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, tied_head=True, vocab=320, length=1024
    ),
    "0.5b": _size(layers=24, embed=896, mlp=4864, heads=14, kv_heads=2, head_dim=64, tied_head=True, vocab=151_936),
    "1.5b": _size(layers=28, embed=1536, mlp=8960, heads=12, kv_heads=2, tied_head=True, vocab=151_936),
    "3b": _size(layers=36, embed=2048, mlp=11_008, heads=16, kv_heads=2, tied_head=True, vocab=151_936),
    "7b": _size(layers=28, embed=3584, mlp=18_944, heads=28, kv_heads=4),
    "14b": _size(layers=48, embed=5120, mlp=13_824, heads=40, kv_heads=8),
    "32b": _size(layers=64, embed=5120, mlp=27_648, heads=40, kv_heads=8),
    "72b": _size(layers=80, embed=8192, mlp=29_568, heads=64, kv_heads=8),
}

_DEFAULTS = transformers_defaults(layers=32, embed=4096, mlp=22_016, heads=32, kv_heads=32, head_dim=None,
                                  vocab=151_936, length=32_768)  # fmt: skip

FAMILY = register(
    Family(
        title="Qwen2",
        spec=Qwen2,
        sizes=QWEN2,
        architecture="Qwen2ForCausalLM",
        classifier="Qwen2ForSequenceClassification",
        model_types=("qwen2",),
        choices=_CHOICES,
        defaults=_DEFAULTS,
        fixed={"attention_dropout": 0.0},
        layers=LayerFields(attention_bias=None),
        fields=(Heads(), LateWindows(), SharedRope(), TiedHead()),
    )
)
