"""A model family of another package, in one file: a Llama with norms of queries and keys."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from nnxdsl import Model
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.config.tensors import MTPTensors
from nnxdsl.models.families.family import Family, decoder
from nnxdsl.models.families.fields import Heads, SharedRope, TiedHead
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Pico(Model):
    """A small family.

    Attributes:
        size: The one size that there is.
        weights: Where the first parameters come from.
        tokenizer: What turns text into ids.
    """

    size: Literal["tiny"] = attrs.field(kw_only=False)


_CHOICES: dict[str, Any] = {"attention.query_key_norm": "row", "norm.placement": "pre"}
PICO = {
    "tiny": decoder(
        layers=2, embed=16, mlp=32, heads=2, kv_heads=1, head_dim=8, vocab=48, length=64, rope=Rope(theta=10_000.0),
        tied_head=False, **_CHOICES,
    )
}  # fmt: skip

FAMILY = register(
    Family(
        title="Pico",
        spec=Pico,
        sizes=PICO,
        architecture="PicoForCausalLM",
        model_types=("pico",),
        choices=_CHOICES,
        defaults={
            "vocab_size": 48,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": None,
            "head_dim": None,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
        },
        fixed={"hidden_act": "silu"},
        fields=(Heads(), SharedRope(), TiedHead()),
        mtp=MTPTensors(prefix="ahead.", block_prefix="ahead.layer.", has_copies=False),
    )
)
