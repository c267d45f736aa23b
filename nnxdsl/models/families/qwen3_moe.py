"""Qwen3's mixtures of experts: spec, the published sizes (arXiv:2505.09388) and `config.json`; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from typing import Any, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import DenseLayers, Heads, MoE, SharedRope, TiedHead, UniformWindow, with_num_experts
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Qwen3MoE(Model):
    """Qwen3, its mixtures of experts (Qwen Team 2025, arXiv:2505.09388).

    QK norms, experts; dense layers among them are supported.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.1 million parameters, for a laptop.
    """

    size: Literal["tiny", "30b-a3b", "235b-a22b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


_CHOICES: dict[str, Any] = {"attention.query_key_norm": "head"}


def _size(*, expert: int, experts: int = 128, per_tok: int = 8, **numbers: Any) -> DecoderConfig:
    moe = MoEConfig(num_experts=experts, num_experts_per_tok=per_tok, mlp_dim=expert)
    common: dict[str, Any] = {"kv_heads": 4, "head_dim": 128, "vocab": 151_936, "length": 40_960}
    return decoder(rope=Rope(theta=1e6), feed_forward=moe, tied_head=False, **{**_CHOICES, **common, **numbers})


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
QWEN3_MOE = {
    "tiny": _size(layers=4, embed=128, mlp=384, expert=64, heads=4, kv_heads=2, head_dim=32, experts=8, per_tok=2,
                  vocab=320, length=1024),
    "30b-a3b": _size(layers=48, embed=2048, mlp=6144, expert=768, heads=32),
    "235b-a22b": _size(layers=94, embed=4096, mlp=12_288, expert=1536, heads=64),
}  # fmt: skip

_DEFAULTS = transformers_defaults(layers=24, embed=2048, mlp=6144, heads=32, kv_heads=4, head_dim=None,
                                  vocab=151_936, length=32_768, num_experts=128, num_experts_per_tok=8,
                                  moe_intermediate_size=768)  # fmt: skip

FAMILY = register(
    Family(
        title="Qwen3 MoE",
        spec=Qwen3MoE,
        sizes=QWEN3_MOE,
        architecture="Qwen3MoeForCausalLM",
        classifier="Qwen3MoeForSequenceClassification",
        model_types=("qwen3_moe",),
        choices=_CHOICES,
        defaults=_DEFAULTS,
        fixed={"attention_dropout": 0.0},
        ignored=("max_window_layers",),  # which counts in the dense models of the family alone
        fields=(
            Heads(),
            UniformWindow(default=4096, is_switched=True),
            MoE(
                norm_topk_prob=False,
            ),
            DenseLayers(),
            SharedRope(),
            TiedHead(),
        ),
        prepare=with_num_experts,
    )
)
