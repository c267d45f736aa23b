"""GLM-4.7-Flash: spec, the published size (Zhipu AI, 2026) and spellings; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from typing import Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.tensors import MTPTensors
from nnxdsl.models.families.deepseek_v3 import MLA, SCORING, MLARope, TypedExperts, mla_size
from nnxdsl.models.families.family import Family, transformers_defaults
from nnxdsl.models.families.fields import TiedHead
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class GLM4MoELite(Model):
    """GLM-4.7-Flash (Zhipu AI, 2026): latent attention, experts with sigmoid scores and a shared one.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.1 million parameters, for a laptop.
    """

    size: Literal["tiny", "4.7-flash"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_layers: int = attrs.field(default=0, validator=Limit(at_least=0, at_most=1))


def _moe(count: int, per_tok: int, mlp: int) -> MoEConfig:
    return MoEConfig(
        num_experts=count,
        num_experts_per_tok=per_tok,
        mlp_dim=mlp,
        shared_expert_dim=mlp,
        routed_scaling_factor=1.8,
        **SCORING,
    )


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
GLM4_MOE_LITE = {
    "tiny": mla_size(
        layers=4, dense_layers=1, embed=128, mlp=384, heads=4, vocab=320, length=1024, theta=1e6, norm_eps=1e-5,
        mla=MLAConfig(q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48),
        moe=_moe(8, 2, 64),
    ),
    "4.7-flash": mla_size(
        layers=47, dense_layers=1, embed=2048, mlp=10_240, heads=20, vocab=154_880, length=202_752, theta=1e6,
        norm_eps=1e-5, moe=_moe(64, 4, 1536),
        mla=MLAConfig(q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
    ),
}  # fmt: skip

FAMILY = register(
    Family(
        title="GLM-4.7-Flash",
        spec=GLM4MoELite,
        sizes=GLM4_MOE_LITE,
        architecture="Glm4MoeLiteForCausalLM",
        model_types=("glm4_moe_lite",),
        defaults=transformers_defaults(layers=47, embed=2048, mlp=10_240, heads=20, kv_heads=None, head_dim=None,
                                       vocab=154_880, length=202_752, norm_eps=1e-5, moe_intermediate_size=1536,
                                       n_shared_experts=1, n_routed_experts=64, num_experts_per_tok=4, n_group=1,
                                       topk_group=1, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=192,
                                       qk_rope_head_dim=64, v_head_dim=256),
        fixed={
            "attention_dropout": 0.0,
            "topk_method": "noaux_tc",
            "partial_rotary_factor": 1.0,
        },
        ignored=("num_nextn_predict_layers", "num_mtp_layers", "pretraining_tp"),
        fields=(MLA(q_lora_rank=768), TypedExperts(scale=1.8), MLARope(), TiedHead()),
        mtp=MTPTensors(),
    )
)  # fmt: skip
