"""Gemma: spec, the published sizes (Gemma Team, arXiv:2403.08295) and `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig, Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, Heads, SharedRope
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Gemma(Model):
    """Gemma (Gemma Team 2024, arXiv:2403.08295).

    Attributes:
        size: Published size, or "tiny": 5 layers, 1.0 million parameters, for a laptop.
    """

    size: Literal["tiny", "2b", "7b"] = attrs.field(kw_only=False)


CHOICES: dict[str, Any] = {
    "norm_scale": "zero_centred",
    "activation": "gelu_tanh",
    "scale_embedding": True,
    "tied_head": True,
}
"""What all versions of Gemma share."""

_size = partial(decoder, head_dim=256, rope=Rope(theta=10_000.0), vocab=256_000, length=8192, **CHOICES)

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GEMMA = {
    "tiny": _size(layers=5, embed=128, mlp=384, heads=4, kv_heads=1, head_dim=32, vocab=320, length=1024),
    "2b": _size(layers=18, embed=2048, mlp=16_384, heads=8, kv_heads=1),
    "7b": _size(layers=28, embed=3072, mlp=24_576, heads=16, kv_heads=16),
}
_ACTIVATION = "gelu_pytorch_tanh"


class _Activation(Fields):
    """The activation, in both spellings: the first files have "gelu" for its tanh approximation."""

    names: ClassVar[tuple[str, ...]] = ("hidden_activation", "hidden_act")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        activation = file.fields.get("hidden_activation") or file.fields.get("hidden_act", _ACTIVATION)
        if activation != _ACTIVATION:
            file.problems.append(
                f"hidden_act: only {_ACTIVATION!r} is implemented, got {activation!r}; if the model was trained with "
                f"the approximation, as Google's were, set hidden_activation to it"
            )
        return {}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"hidden_act": _ACTIVATION}


_DEFAULTS = transformers_defaults(layers=28, embed=3072, mlp=24_576, heads=16, kv_heads=16, head_dim=256,
                                  vocab=256_000, length=8192)  # fmt: skip

FAMILY = register(
    Family(
        title="Gemma",
        spec=Gemma,
        sizes=GEMMA,
        architecture="GemmaForCausalLM",
        model_types=("gemma",),
        choices=CHOICES,
        defaults=_DEFAULTS,
        fixed={
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": False,
        },
        fields=(Heads(), SharedRope(), _Activation()),
    )
)
