"""Llama 3: spec, the published sizes (Llama Team, arXiv:2407.21783) and `config.json`; no jax."""

from __future__ import annotations

from functools import partial
from typing import Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.rope import Llama3RopeScaling, Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, SharedRope, TiedHead
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Llama3(Model):
    """Llama 3, text only (Llama Team 2024, arXiv:2407.21783): "1b" and "3b" are Llama 3.2, the larger ones Llama 3.1.

    RoPE scaled by frequency; embeddings tied or not.

    Attributes:
        size: Published size, or "tiny": 5 layers, 1.1 million parameters, for a laptop.
    """

    size: Literal["tiny", "1b", "3b", "8b", "70b", "405b"] = attrs.field(kw_only=False)


def _rope(factor: float, original: int = 8192) -> Rope:
    scaling = Llama3RopeScaling(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=original)
    return Rope(theta=500_000.0, factor=factor, scaling=scaling)


_size = partial(decoder, kv_heads=8, head_dim=128, norm_eps=1e-5, vocab=128_256, length=131_072)

# As the published config.json files have them: 1b and 3b are Llama 3.2, the others Llama 3.1; `tiny` is ours, for
# laptops and the byte tokenizer.
LLAMA3 = {
    "tiny": _size(layers=5, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, rope=_rope(4.0, 256), tied_head=False,
                  vocab=320, length=1024),
    "1b": _size(layers=16, embed=2048, mlp=8192, heads=32, head_dim=64, rope=_rope(32.0), tied_head=True),
    "3b": _size(layers=28, embed=3072, mlp=8192, heads=24, rope=_rope(32.0), tied_head=True),
    "8b": _size(layers=32, embed=4096, mlp=14_336, heads=32, rope=_rope(8.0), tied_head=False),
    "70b": _size(layers=80, embed=8192, mlp=28_672, heads=64, rope=_rope(8.0), tied_head=False),
    "405b": _size(layers=126, embed=16_384, mlp=53_248, heads=128, rope=_rope(8.0), tied_head=False),
}  # fmt: skip

_DEFAULTS = transformers_defaults(layers=32, embed=4096, mlp=11_008, heads=32, kv_heads=None, head_dim=None,
                                  vocab=32_000, length=2048)  # fmt: skip

FAMILY = register(
    Family(
        title="Llama 3",
        spec=Llama3,
        sizes=LLAMA3,
        architecture="LlamaForCausalLM",
        classifier="LlamaForSequenceClassification",
        model_types=("llama",),
        defaults=_DEFAULTS,
        fixed={"attention_dropout": 0.0},
        ignored=("pretraining_tp",),  # which once split sums without changing them
        layers=LayerFields(mlp_bias=True),
        fields=(Heads(), SharedRope(), TiedHead()),
    )
)
