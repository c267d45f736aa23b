"""GLM-5: spec, the published size (GLM-5 Team, arXiv:2602.15763) and spellings; no jax."""


# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import IndexerStage, Model
from nnxdsl.models.config.indexer import IndexerConfig
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.families.deepseek_v3 import SCORING, MLARope, TypedExperts, mla_size
from nnxdsl.models.families.deepseek_v32 import FIXED, IGNORED, SparseMLA
from nnxdsl.models.families.family import Family, transformers_defaults
from nnxdsl.models.families.fields import TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class GLM5(Model):
    """GLM-5 and 5.1 (GLM-5 Team 2026, arXiv:2602.15763): latent and sparse attention as in DeepSeek-V3.2, experts.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.2 million parameters, for a laptop; a token attends to 32 others.
    """

    size: Literal["tiny", "744b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    indexer_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    indexer_stage: IndexerStage = "sparse"


class _SparseMLA(SparseMLA):
    """Indexers in every layer: GLM-5.2's layers that reuse the selection of an earlier one are not implemented."""

    names: ClassVar[tuple[str, ...]] = (*SparseMLA.names, "indexer_types", "index_topk_pattern", "index_topk_freq")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers, fields = file.numbers["num_hidden_layers"], file.fields
        spellings = {"indexer_types": ["full"] * layers, "index_topk_pattern": "F" * layers, "index_topk_freq": 1}
        if "indexer_types" in fields:  # which transformers reads alone
            spellings = {"indexer_types": spellings["indexer_types"]}
        for name, wanted in spellings.items():
            if (value := fields.get(name)) not in (None, wanted, ["full"] * layers):
                reason = "layers that share the selection of an earlier layer are not implemented"
                file.problems.append(f"{name}: {reason}; expected {_short(wanted)}, got {_short(value)}")
        return super().read(file, decoder)


def _short(value: object) -> str:
    """A value as text; of a list of types only the kinds."""
    return f"only {sorted(map(str, set(value)))}" if isinstance(value, list) else repr(value)


def _moe(count: int, per_tok: int, mlp: int) -> MoEConfig:
    widths = {"mlp_dim": mlp, "shared_expert_dim": mlp}
    return MoEConfig(num_experts=count, num_experts_per_tok=per_tok, routed_scaling_factor=2.5, **widths, **SCORING)


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
GLM5_SIZES = {
    "tiny": mla_size(
        layers=4, dense_layers=1, embed=128, mlp=384, heads=4, vocab=320, length=1024, theta=1e6, norm_eps=1e-5,
        mla=MLAConfig(q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48,
                      indexer=IndexerConfig(num_heads=4, head_dim=32, topk=32, rope_interleave=True)),
        moe=_moe(8, 2, 64),
    ),
    "744b": mla_size(
        layers=78, dense_layers=3, embed=6144, mlp=12_288, heads=64, vocab=154_880, length=202_752, theta=1e6,
        norm_eps=1e-5, moe=_moe(256, 8, 2048),
        mla=MLAConfig(q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
                      indexer=IndexerConfig(num_heads=32, head_dim=128, topk=2048, rope_interleave=True)),
    ),
}  # fmt: skip

FAMILY = register(
    Family(
        title="GLM-5",
        spec=GLM5,
        sizes=GLM5_SIZES,
        architecture="GlmMoeDsaForCausalLM",
        model_types=("glm_moe_dsa",),
        defaults=transformers_defaults(layers=78, embed=6144, mlp=12_288, heads=64, kv_heads=None, head_dim=None,
                                       vocab=154_880, length=202_752, norm_eps=1e-5, moe_intermediate_size=2048,
                                       n_shared_experts=1, n_routed_experts=256, num_experts_per_tok=8, n_group=1,
                                       topk_group=1, q_lora_rank=2048, kv_lora_rank=512, qk_nope_head_dim=192,
                                       qk_rope_head_dim=64, v_head_dim=256, index_n_heads=32, index_head_dim=128,
                                       index_topk=2048),
        fixed=FIXED,
        ignored=(*IGNORED, "index_skip_topk_offset", "index_share_for_mtp_iteration"),
        fields=(_SparseMLA(interleaves=True), TypedExperts(counts_dense=True), MLARope(), TiedHead()),
    )
)  # fmt: skip
