"""Phi-3 and Phi-4: spec, the published sizes (Microsoft, arXiv:2404.14219, 2412.08905) and tensor names; no jax."""

from __future__ import annotations

from functools import partial
from typing import Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig, Rope
from nnxdsl.models.config.tensors import joined
from nnxdsl.models.families.family import Family, Tensors, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, PadToken, SharedRope, TiedHead, UniformWindow
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Phi3(Model):
    """Phi-3 (Microsoft 2024, arXiv:2404.14219) and Phi-4 (arXiv:2412.08905), without LongRoPE.

    Attributes:
        size: Published size, or "tiny": 4 layers, 0.9 million parameters, for a laptop. "4" is Phi-4, of 14 billion.
    """

    size: Literal["tiny", "3-mini-4k", "3-medium-4k", "4"] = attrs.field(kw_only=False)


_size = partial(decoder, norm_eps=1e-5, tied_head=False)
_large = partial(_size, layers=40, embed=5120, mlp=17_920, heads=40, kv_heads=10, head_dim=128)
_windows = {"window": 2047, "pattern": ("local",), "vocab": 32_064, "length": 4096, "rope": Rope(theta=10_000.0)}

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
PHI3 = {
    "tiny": _size(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, vocab=320, length=1024,
                  rope=Rope(theta=10_000.0)),
    "3-mini-4k": _size(layers=32, embed=3072, mlp=8192, heads=32, kv_heads=32, head_dim=96, **_windows),
    "3-medium-4k": _large(**_windows),
    "4": _large(vocab=100_352, length=16_384, rope=Rope(theta=250_000.0)),
}  # fmt: skip


def _tensors(config: DecoderConfig, tensors: Tensors) -> Tensors:
    """Queries, keys and values are rows of one tensor, and so are gate and up."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"query": queries, "key": keys, "value": keys}
    mlp = {"mlp.gate.kernel": config.mlp_dim, "mlp.up.kernel": config.mlp_dim}
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
        model_types=("phi3",),
        defaults=transformers_defaults(layers=32, embed=3072, mlp=8192, heads=32, kv_heads=None, head_dim=None,
                                       vocab=32_064, length=4096, norm_eps=1e-5),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        ignored=("original_max_position_embeddings", "auto_map"),  # of LongRoPE, which is refused by its name
        fields=(Heads(), UniformWindow(default=None), SharedRope(partial_rotary_factor=1.0), TiedHead(), PadToken()),
        layer_tensors=_tensors,
        is_general=True,
    )
)  # fmt: skip
