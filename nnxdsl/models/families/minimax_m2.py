"""MiniMax-M2: spec, the published size (MiniMax, 2025), `config.json` and tensor names; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.moe import MoEConfig, moe_tensors
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.config.tensors import TensorSource
from nnxdsl.models.families.deepseek_v3 import SCORING
from nnxdsl.models.families.family import Family, Tensors, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, MoE, SharedRope, TiedHead
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class MiniMaxM2(Model):
    """MiniMax-M2 (MiniMax, 2025): partial rotary positions, QK norms over all heads, experts with sigmoid scores.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.1 million parameters, for a laptop.
    """

    size: Literal["tiny", "230b-a10b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


_CHOICES: dict[str, Any] = {"attention.query_key_norm": "row"}


def _size(*, mlp: int, experts: tuple[int, int], **numbers: Any) -> DecoderConfig:
    count, per_tok = experts
    moe = MoEConfig(num_experts=count, num_experts_per_tok=per_tok, mlp_dim=mlp, **SCORING)
    rope = Rope(theta=5e6, partial_rotary_factor=0.5)
    return decoder(mlp=mlp, feed_forward=moe, rope=rope, tied_head=False, **_CHOICES, **numbers)


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
MINIMAX_M2 = {
    "tiny": _size(layers=4, embed=128, mlp=64, heads=4, kv_heads=2, head_dim=32, experts=(8, 2), vocab=320,
                  length=1024),
    "230b-a10b": _size(layers=62, embed=3072, mlp=1536, heads=48, kv_heads=8, head_dim=128, experts=(256, 8),
                       vocab=200_064, length=196_608),
}  # fmt: skip


def _prepared(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with the spellings that transformers writes in place of those of the published file."""
    prepared = dict(fields)
    types = prepared.get("attn_type_list") or []
    if isinstance(types, list) and all(kind == 1 for kind in types):  # softmax attention in all layers
        prepared.pop("attn_type_list", None)
    rotary, width = prepared.pop("rotary_dim", None), prepared.get("head_dim", 128)
    if isinstance(rotary, int) and isinstance(width, int) and width:
        prepared.setdefault("partial_rotary_factor", rotary / width)
    return prepared


def _tensors(config: DecoderConfig, tensors: Tensors) -> Tensors:
    assert config.moe is not None  # of this family
    names = {"router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts"}
    correction = {"mlp.router.correction": TensorSource(("block_sparse_moe.e_score_correction_bias",))}
    return tensors | moe_tensors(config.moe, config, **names, matrices=("w1", "w3", "w2")) | correction


FAMILY = register(
    Family(
        title="MiniMax-M2",
        spec=MiniMaxM2,
        sizes=MINIMAX_M2,
        architecture="MiniMaxM2ForCausalLM",
        model_types=("minimax_m2",),
        choices=_CHOICES,
        defaults=transformers_defaults(layers=62, embed=3072, mlp=1536, heads=48, kv_heads=8, head_dim=128,
                                       vocab=200_064, length=196_608, num_local_experts=256, num_experts_per_tok=8),
        fixed={
            "attention_dropout": 0.0,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
            "layernorm_full_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
        },
        ignored=(
            *("mtp_transformer_layers", "num_mtp_modules", "use_mtp"),  # layers beside the decoder
            *("layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode"),  # of layers it has not
            "auto_map",
        ),
        layers=LayerFields(attention_bias=None),
        fields=(
            Heads(),
            MoE(count="num_local_experts", width="intermediate_size", constants=SCORING),
            SharedRope(theta=5e6, partial_rotary_factor=1.0),
            TiedHead(),
        ),
        prepare=_prepared,
        layer_tensors=_tensors,
    )
)  # fmt: skip
