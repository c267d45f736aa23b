"""Phi-3 and Phi-4: spec, the published sizes (Microsoft, arXiv:2404.14219, 2412.08905) and tensor names; no jax."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.rope import LongRope, Rope
from nnxdsl.models.config.tensors import joined
from nnxdsl.models.families.family import Family, Tensors, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, PadToken, SharedRope, TiedHead, UniformWindow
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Phi3(Model):
    """Phi-3 (Microsoft 2024, arXiv:2404.14219) and Phi-4 (arXiv:2412.08905, 2503.01743).

    A Mistral, whose files join queries, keys and values, and gate and up; LongRoPE.

    Attributes:
        size: Published size, or "tiny": 4 layers, 0.9 million parameters, for a laptop. "4" is Phi-4, of 14 billion,
            and "4-mini" has LongRoPE.
    """

    size: Literal["tiny", "3-mini-4k", "3-medium-4k", "4", "4-mini"] = attrs.field(kw_only=False)


_size = partial(decoder, norm_eps=1e-5, tied_head=False)
_large = partial(_size, layers=40, embed=5120, mlp=17_920, heads=40, kv_heads=10, head_dim=128)
_windows = {"window": 2047, "pattern": ("local",), "vocab": 32_064, "length": 4096, "rope": Rope(theta=10_000.0)}
_long_factor = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
    16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)  # fmt: skip
_long_rope = LongRope(
    short_factor=(1.0,) * 48,
    long_factor=_long_factor,
    original_max_position_embeddings=4096,
    attention_factor=math.sqrt(1 + math.log(32) / math.log(4096)),  # for an extension by 32
)

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
PHI3 = {
    "tiny": _size(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, vocab=320, length=1024,
                  rope=Rope(theta=10_000.0)),
    "3-mini-4k": _size(layers=32, embed=3072, mlp=8192, heads=32, kv_heads=32, head_dim=96, **_windows),
    "3-medium-4k": _large(**_windows),
    "4": _large(vocab=100_352, length=16_384, rope=Rope(theta=250_000.0)),
    "4-mini": _size(layers=32, embed=3072, mlp=8192, heads=24, kv_heads=8, head_dim=128, vocab=200_064,
                    length=131_072, window=262_144, pattern=("local",), tied_head=True,
                    rope=Rope(theta=10_000.0, partial_rotary_factor=0.75, scaling=_long_rope)),
}  # fmt: skip


def _tensors(config: DecoderConfig, tensors: Tensors) -> Tensors:
    """Queries, keys and values are rows of one tensor, and so are gate and up."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"query": queries, "key": keys, "value": keys}
    mlp = {"mlp.gate.kernel": config.mlp.dim, "mlp.up.kernel": config.mlp.dim}
    return (
        tensors
        | joined("self_attn.qkv_proj.weight", {f"attention.{name}.kernel": width for name, width in attention.items()})
        | joined("mlp.gate_up_proj.weight", mlp)
    )


FAMILY = register(
    Family(
        title="Phi-3",
        spec=Phi3,
        sizes=PHI3,
        architecture="Phi3ForCausalLM",
        classifier="Phi3ForSequenceClassification",
        model_types=("phi3",),
        defaults=transformers_defaults(layers=32, embed=3072, mlp=8192, heads=32, kv_heads=None, head_dim=None,
                                       vocab=32_064, length=4096, norm_eps=1e-5),
        fixed={
            "attention_bias": False,
            "attention_dropout": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        ignored=("auto_map", "interpolate_factor", "full_attn_mod"),
        layers=LayerFields(attention_bias=None),
        fields=(Heads(), UniformWindow(default=None), SharedRope(partial_rotary_factor=1.0, has_long=True), TiedHead(),
                PadToken()),
        layer_tensors=_tensors,
        is_general=True,
    )
)  # fmt: skip
