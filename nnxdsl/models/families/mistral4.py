"""Mistral Small 4: spec, the published size (Mistral AI, 2026), `config.json` and tensor names; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.attention import QueryTemperature
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.tensors import TensorSource, joined
from nnxdsl.models.families.deepseek_v3 import MLA, Experts, MLARope, mla_size
from nnxdsl.models.families.family import Family, Tensors, transformers_defaults
from nnxdsl.models.families.fields import TiedHead
from nnxdsl.models.families.ministral3 import BETA, IGNORED, Temperature, nested
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Mistral4(Model):
    """Mistral Small 4, text only (Mistral AI, 2026): latent attention, softmax experts, sharper queries far away.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.2 million parameters, for a laptop.
    """

    size: Literal["tiny", "small-119b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


def _temperature(length: int) -> dict[str, Any]:
    return {"attention.query_temperature": QueryTemperature(beta=0.1, length=length)}


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
MISTRAL4 = {
    "tiny": mla_size(
        layers=4, embed=128, mlp=384, heads=4, vocab=320, length=1024, factor=4.0, original=64,
        **_temperature(64),
        mla=MLAConfig(q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        moe=MoEConfig(num_experts=8, num_experts_per_tok=2, mlp_dim=64, shared_expert_dim=64),
    ),
    "small-119b": mla_size(
        layers=36, embed=4096, mlp=12_288, heads=32, vocab=131_072, length=1_048_576, factor=128.0, original=8192,
        **_temperature(8192),
        mla=MLAConfig(q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128),
        moe=MoEConfig(num_experts=128, num_experts_per_tok=4, mlp_dim=2048, shared_expert_dim=2048),
    ),
}  # fmt: skip

_PARTIAL = "partial_rotary_factor"
_DEFAULT = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


class _Rope(MLARope):
    """YaRN of the rotary part, written with the factor of queries by position in one object."""

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        assert config.mla is not None  # or the decoder is refused
        parameters, width = nested(super().write(config), config)["rope_parameters"], config.mla.qk_head_dim
        partial = {_PARTIAL: config.mla.qk_rope_head_dim / width}
        return {"rope_parameters": {**parameters, **partial}, "head_dim": width}


def _prepared(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with transformers' rotary positions, and without a head's width and rotary part, which follow."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling")
    prepared = {**fields} if parameters else {**fields, "rope_parameters": _DEFAULT}
    widths = [prepared.get(name, 64) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(isinstance(width, int) and width > 0 for width in widths):
        following = {"head_dim": sum(widths), _PARTIAL: widths[1] / sum(widths)}
        prepared = {name: value for name, value in prepared.items() if value != following.get(name)}
    return prepared


def _tensors(config: DecoderConfig, tensors: Tensors) -> Tensors:
    """The experts of a layer are in one tensor, gate above up."""
    if config.moe is None or "mlp.router.weight" not in tensors:
        return tensors
    width = config.moe.mlp_dim
    down = {"mlp.down.kernel": TensorSource(("mlp.experts.down_proj",), transposed=True)}
    return tensors | joined("mlp.experts.gate_up_proj", {"mlp.gate.kernel": width, "mlp.up.kernel": width}) | down


FAMILY = register(
    Family(
        title="Mistral Small 4",
        spec=Mistral4,
        sizes=MISTRAL4,
        architecture="Mistral4ForCausalLM",
        classifier="Mistral4ForSequenceClassification",
        model_types=("mistral4",),
        defaults=transformers_defaults(layers=36, embed=4096, mlp=12_288, heads=32, kv_heads=None, head_dim=None,
                                       vocab=131_072, length=1_048_576, moe_intermediate_size=2048, n_shared_experts=1,
                                       n_routed_experts=128, num_experts_per_tok=4, n_group=1, topk_group=1,
                                       q_lora_rank=None, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64,
                                       v_head_dim=128),
        fixed={"attention_dropout": 0.0},
        ignored=("pretraining_tp",),
        fields=(
            MLA(q_lora_rank=1024),
            Experts(constants={}, dense_layers=0, scale=1.0),
            _Rope(ignored=(*IGNORED, _PARTIAL)),
            Temperature(),
            TiedHead(),
        ),
        prepare=_prepared,
        layer_tensors=_tensors,
    )
)  # fmt: skip
