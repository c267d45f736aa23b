"""Gemma 2: spec, the published sizes (Gemma Team, arXiv:2408.00118) and `config.json`; no jax."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.layer_pattern import local_then_global
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import ScaledQueries, SharedRope, SoftCaps, WindowPattern
from nnxdsl.models.families.gemma import CHOICES
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Gemma2(Model):
    """Gemma 2 (Gemma Team 2024, arXiv:2408.00118): scores and logits are capped, every second layer has a window.

    Norms are before and after each sublayer.

    Attributes:
        size: Published size, or "tiny": 5 layers, 1.0 million parameters, for a laptop.
    """

    size: Literal["tiny", "2b", "9b", "27b"] = attrs.field(kw_only=False)


_CHOICES: dict[str, Any] = {**CHOICES, "norm.placement": "sandwich"}
_CAPS: dict[str, Any] = {"attention.soft_cap": 50.0, "head.soft_cap": 30.0}
_PATTERN = local_then_global(2)
_size = partial(decoder, head_dim=256, scalar=256, window=4096, pattern=_PATTERN, rope=Rope(theta=10_000.0),
                vocab=256_000, length=8192, **_CAPS, **_CHOICES)  # fmt: skip

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GEMMA2 = {
    "tiny": _size(layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, scalar=32, window=64, vocab=320,
                  length=1024),
    "2b": _size(layers=26, embed=2304, mlp=9216, heads=8, kv_heads=4),
    "9b": _size(layers=42, embed=3584, mlp=14_336, heads=16, kv_heads=8),
    "27b": _size(layers=46, embed=4608, mlp=36_864, heads=32, kv_heads=16, head_dim=128, scalar=144),
}  # fmt: skip

_DEFAULTS = transformers_defaults(layers=26, embed=2304, mlp=9216, heads=8, kv_heads=4, head_dim=256, vocab=256_000,
                                  length=8192, query_pre_attn_scalar=256, sliding_window=4096)  # fmt: skip

FAMILY = register(
    Family(
        title="Gemma 2",
        spec=Gemma2,
        sizes=GEMMA2,
        architecture="Gemma2ForCausalLM",
        classifier="Gemma2ForSequenceClassification",
        model_types=("gemma2",),
        choices=_CHOICES,
        defaults=_DEFAULTS,
        fixed={
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": False,
        },
        ignored=("hidden_act", "sliding_window_size"),  # not read by transformers; of the first files
        layers=LayerFields(activation=("hidden_activation",)),
        fields=(
            WindowPattern(pattern=_PATTERN, default=4096),
            SharedRope(),
            ScaledQueries(),
            SoftCaps(scores=50.0, logits=30.0),
        ),
    )
)
