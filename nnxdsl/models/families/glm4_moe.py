"""GLM-4.5 to 4.7: spec, the published sizes (Zhipu AI 2025, arXiv:2508.06471) and spellings; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.attention import QueryKeyNorm
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.config.tensors import MTPTensors
from nnxdsl.models.families.deepseek_v3 import SCORING, Experts
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, Heads, SharedRope, TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class GLM4MoE(Model):
    """GLM-4.5, 4.6 and 4.7 (Zhipu AI 2025, arXiv:2508.06471): partial rotary positions, experts with sigmoid scores.

    Half of a head is rotated; the scores have a bias correction; dense layers first.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.1 million parameters, for a laptop. 4.6 and 4.7 are equal but for
            their weights.
    """

    size: Literal["tiny", "4.5-air", "4.5", "4.7"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_layers: int = attrs.field(default=0, validator=Limit(at_least=0, at_most=1))


_PARTIAL_ROTARY = 0.5


def _size(
    *, experts: tuple[int, int, int], scale: float = 2.5, query_key_norm: QueryKeyNorm = "none", **numbers: Any
) -> DecoderConfig:
    """A size, of (experts, experts of a token, their width)."""
    count, per_tok, mlp = experts
    moe = MoEConfig(
        num_experts=count,
        num_experts_per_tok=per_tok,
        mlp_dim=mlp,
        shared_expert_dim=mlp,
        routed_scaling_factor=scale,
        **SCORING,
    )
    common: dict[str, Any] = {"heads": 96, "kv_heads": 8, "head_dim": 128, "vocab": 151_552, "length": 131_072}
    rope = Rope(theta=1e6, partial_rotary_factor=_PARTIAL_ROTARY)
    return decoder(
        feed_forward=moe,
        rope=rope,
        norm_eps=1e-5,
        tied_head=False,
        **{**common, "attention.bias": "qkv", "attention.query_key_norm": query_key_norm, **numbers},
    )


_large = partial(_size, layers=92, dense_layers=3, embed=5120, mlp=12_288, experts=(160, 8, 1536),
                 query_key_norm="head")  # fmt: skip

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GLM4_MOE = {
    "tiny": _size(layers=4, dense_layers=1, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, experts=(8, 2, 64),
                  query_key_norm="head", vocab=320, length=1024),
    "4.5-air": _size(layers=46, dense_layers=1, embed=4096, mlp=10_944, experts=(128, 8, 1408), scale=1.0),
    "4.5": _large(),
    "4.7": _large(length=202_752),
}  # fmt: skip


class _Attention(Fields):
    """Biases of queries, keys and values, and norms of queries and keys, which differ between sizes."""

    names: ClassVar[tuple[str, ...]] = ("use_qk_norm",)
    decides: ClassVar[tuple[str, ...]] = ("attention.query_key_norm",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "attention.query_key_norm": "head" if file.flag("use_qk_norm", False) else "none",
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "use_qk_norm": config.attention.query_key_norm != "none",
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "attention.query_key_norm": "none" if config.attention.query_key_norm == "none" else "head",
        }


FAMILY = register(
    Family(
        title="GLM-4.5",
        spec=GLM4MoE,
        sizes=GLM4_MOE,
        architecture="Glm4MoeForCausalLM",
        model_types=("glm4_moe",),
        defaults=transformers_defaults(layers=46, embed=4096, mlp=10_944, heads=96, kv_heads=8, head_dim=None,
                                       vocab=151_552, length=131_072, norm_eps=1e-5, moe_intermediate_size=1408,
                                       n_shared_experts=1, n_routed_experts=128, num_experts_per_tok=8, n_group=1,
                                       topk_group=1),
        fixed={"attention_dropout": 0.0},
        ignored=("num_nextn_predict_layers", "num_mtp_layers"),
        layers=LayerFields(attention_bias="qkv"),
        fields=(
            Heads(),
            _Attention(),
            Experts(dense_layers=1, scale=1.0),
            SharedRope(partial_rotary_factor=_PARTIAL_ROTARY),
            TiedHead(),
        ),
        mtp=MTPTensors(),
    )
)  # fmt: skip
