"""Mistral: spec, the published sizes (Jiang et al. 2023, arXiv:2310.06825) and `config.json`; no jax."""

from __future__ import annotations

from functools import partial
from typing import Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, SharedRope, TiedHead, UniformWindow
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Mistral(Model):
    """Mistral (Jiang et al. 2023, arXiv:2310.06825); "7b" is version 0.3, "small-24b" the text model of January 2025.

    A sliding window on all layers, or on none.

    Attributes:
        size: Published size, or "tiny": 5 layers, 1.1 million parameters, for a laptop.
    """

    size: Literal["tiny", "7b-v0.1", "7b", "nemo-12b", "small-24b"] = attrs.field(kw_only=False)


_size = partial(decoder, kv_heads=8, head_dim=128, norm_eps=1e-5, tied_head=False)

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer. "7b" is version 0.3;
# the first version, "7b-v0.1", is the one with a window.
MISTRAL = {
    "tiny": _size(layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, rope=Rope(theta=10_000.0), window=64,
                  pattern=("local",), vocab=320, length=1024),
    "7b-v0.1": _size(layers=32, embed=4096, mlp=14_336, heads=32, rope=Rope(theta=10_000.0), window=4096,
                     pattern=("local",), vocab=32_000, length=32_768),
    "7b": _size(layers=32, embed=4096, mlp=14_336, heads=32, rope=Rope(theta=1e6), vocab=32_768, length=32_768),
    "nemo-12b": _size(layers=40, embed=5120, mlp=14_336, heads=32, rope=Rope(theta=1e6), vocab=131_072, length=131_072),
    "small-24b": _size(layers=40, embed=5120, mlp=32_768, heads=32, rope=Rope(theta=1e8), vocab=131_072, length=32_768),
}  # fmt: skip

_DEFAULTS = transformers_defaults(layers=32, embed=4096, mlp=14_336, heads=32, kv_heads=8, head_dim=None,
                                  vocab=32_000, length=131_072)  # fmt: skip

FAMILY = register(
    Family(
        title="Mistral",
        spec=Mistral,
        sizes=MISTRAL,
        architecture="MistralForCausalLM",
        classifier="MistralForSequenceClassification",
        model_types=("mistral",),
        defaults=_DEFAULTS,
        fixed={"attention_dropout": 0.0},
        layers=LayerFields(attention_bias=None),
        fields=(Heads(), UniformWindow(default=4096), SharedRope(), TiedHead()),
    )
)
