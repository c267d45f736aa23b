"""Mixtral: spec, the published sizes (Jiang et al. 2024, arXiv:2401.04088), `config.json` and names; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from typing import Any, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.moe import MoEConfig, moe_tensors
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, Tensors, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, MoE, SharedRope, TiedHead, UniformWindow
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Mixtral(Model):
    """Mixtral (Jiang et al. 2024, arXiv:2401.04088): each token goes through two of eight experts.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.1 million parameters, for a laptop.
    """

    size: Literal["tiny", "8x7b", "8x22b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


def _size(*, mlp: int, experts: int = 8, **numbers: Any) -> DecoderConfig:
    moe = MoEConfig(num_experts=experts, num_experts_per_tok=2, mlp_dim=mlp)
    common = {"kv_heads": 8, "head_dim": 128, "vocab": 32_000, "rope": Rope(theta=1e6), "norm_eps": 1e-5}
    return decoder(mlp=mlp, feed_forward=moe, tied_head=False, **{**common, **numbers})


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
MIXTRAL = {
    "tiny": _size(layers=4, embed=128, mlp=128, heads=4, kv_heads=2, head_dim=32, experts=4, vocab=320, length=1024),
    "8x7b": _size(layers=32, embed=4096, mlp=14_336, heads=32, length=32_768),
    "8x22b": _size(layers=56, embed=6144, mlp=16_384, heads=48, length=65_536),
}


def _tensors(config: DecoderConfig, tensors: Tensors) -> Tensors:
    assert config.moe is not None  # of this family
    names = {"router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts"}
    return tensors | moe_tensors(config.moe, config, **names, matrices=("w1", "w3", "w2"))


_DEFAULTS = transformers_defaults(layers=32, embed=4096, mlp=14_336, heads=32, kv_heads=8, head_dim=None,
                                  vocab=32_000, length=131_072, norm_eps=1e-5, num_local_experts=8,
                                  num_experts_per_tok=2)  # fmt: skip

FAMILY = register(
    Family(
        title="Mixtral",
        spec=Mixtral,
        sizes=MIXTRAL,
        architecture="MixtralForCausalLM",
        classifier="MixtralForSequenceClassification",
        model_types=("mixtral",),
        defaults=_DEFAULTS,
        fixed={"attention_dropout": 0.0, "router_jitter_noise": 0.0},
        layers=LayerFields(attention_bias=None),
        fields=(
            Heads(),
            MoE(
                count="num_local_experts",
                width="intermediate_size",
            ),
            UniformWindow(default=None),
            SharedRope(theta=1e6),
            TiedHead(),
        ),
        layer_tensors=_tensors,
    )
)
