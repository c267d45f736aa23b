"""Gemma: spec, the published sizes (Gemma Team, arXiv:2403.08295) and `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, SharedRope
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Gemma(Model):
    """Gemma (Gemma Team 2024, arXiv:2403.08295).

    GELU, zero-centred norms, scaled embeddings.

    Attributes:
        size: Published size, or "tiny": 5 layers, 1.0 million parameters, for a laptop.
    """

    size: Literal["tiny", "2b", "7b"] = attrs.field(kw_only=False)


CHOICES: dict[str, Any] = {
    "norm.scale": "zero_centred",
    "mlp.activation": "gelu_tanh",
    "embedding.scaled": True,
    "head.tied": True,
}
"""What all versions of Gemma share."""

_size = partial(decoder, head_dim=256, rope=Rope(theta=10_000.0), vocab=256_000, length=8192, **CHOICES)

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GEMMA = {
    "tiny": _size(layers=5, embed=128, mlp=384, heads=4, kv_heads=1, head_dim=32, vocab=320, length=1024),
    "2b": _size(layers=18, embed=2048, mlp=16_384, heads=8, kv_heads=1),
    "7b": _size(layers=28, embed=3072, mlp=24_576, heads=16, kv_heads=16),
}


class _Layers(LayerFields):
    """The activation in both spellings: the first files have "gelu" for its tanh approximation."""

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        if file.fields.get("hidden_activation") is None and file.fields.get("hidden_act") == "gelu":
            file.problems.append(
                "hidden_act: 'gelu' has two meanings in files of this family: set hidden_activation to "
                "'gelu_pytorch_tanh' if the model was trained with the approximation, as Google's were, else to 'gelu'"
            )
        return super().read(file, decoder)


_DEFAULTS = transformers_defaults(layers=28, embed=3072, mlp=24_576, heads=16, kv_heads=16, head_dim=256,
                                  vocab=256_000, length=8192)  # fmt: skip

FAMILY = register(
    Family(
        title="Gemma",
        spec=Gemma,
        sizes=GEMMA,
        architecture="GemmaForCausalLM",
        classifier="GemmaForSequenceClassification",
        model_types=("gemma",),
        choices=CHOICES,
        defaults=_DEFAULTS,
        fixed={
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_bidirectional_attention": False,
        },
        layers=_Layers(activation=("hidden_activation", "hidden_act")),
        fields=(Heads(), SharedRope()),
    )
)
