"""DeepSeek-V2 and V2-Lite: spec, the published sizes (DeepSeek-AI 2024, arXiv:2405.04434) and spellings; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.families.deepseek_v3 import MLA, Experts, MLARope, mla_size
from nnxdsl.models.families.family import Family, transformers_defaults
from nnxdsl.models.families.fields import TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class DeepSeekV2(Model):
    """DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv:2405.04434): latent attention, experts with softmax scores.

    Multi-head latent attention (MLA); the experts are in groups, with shared ones beside them.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.2 million parameters, for a laptop.
    """

    size: Literal["tiny", "lite-16b", "236b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


_CONSTANTS = {"group_score": "best", "norm_topk_prob": False}
_moe = partial(MoEConfig, num_experts_per_tok=6, **_CONSTANTS)
_WIDTHS: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_size = partial(mla_size, dense_layers=1, vocab=102_400, length=163_840, factor=40.0, mscale=0.707)

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
DEEPSEEK_V2 = {
    "tiny": mla_size(
        layers=4, dense_layers=1, embed=128, mlp=384, heads=4, vocab=320, length=1024, factor=4.0, original=256,
        mla=MLAConfig(kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        moe=_moe(num_experts=8, num_experts_per_tok=2, mlp_dim=64, shared_expert_dim=128, n_group=4, topk_group=2),
    ),
    "lite-16b": _size(
        layers=27, embed=2048, mlp=10_944, heads=16, mla=MLAConfig(**_WIDTHS),
        moe=_moe(num_experts=64, mlp_dim=1408, shared_expert_dim=2816),
    ),
    "236b": _size(
        layers=60, embed=5120, mlp=12_288, heads=128, mla=MLAConfig(q_lora_rank=1536, **_WIDTHS),
        moe=_moe(num_experts=160, mlp_dim=1536, shared_expert_dim=3072, n_group=8, topk_group=3,
                 routed_scaling_factor=16.0),
    ),
}  # fmt: skip


class _Experts(Experts):
    """Experts whose groups count only where `topk_method` says so."""

    def reads(self) -> tuple[str, ...]:
        return (*super().reads(), "topk_method", "n_group", "topk_group")

    def values(self, file: ConfigFile) -> dict[str, Any]:
        method, groups = file.fields.get("topk_method", "greedy"), {}
        if method == "group_limited_greedy":
            groups = {name: file.count(name, 1, least=1) for name in ("n_group", "topk_group")}
        elif method != "greedy":
            file.problems.append(f"topk_method: expected 'greedy' or 'group_limited_greedy', got {method!r}")
        return {**super().values(file), **groups}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        moe = config.moe
        assert moe is not None  # or the decoder is refused
        groups = {"n_group": moe.n_group, "topk_group": moe.topk_group}
        method = "group_limited_greedy" if moe.n_group > 1 else "greedy"
        return {**super().write(config), **groups, "topk_method": method}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        experts = super().expected(config)["feed_forward"]
        moe = config.moe or experts
        return {"feed_forward": attrs.evolve(experts, n_group=moe.n_group, topk_group=moe.topk_group)}


class _MLA(MLA):
    """Latent attention, whose rotary part is always of pairs of neighbours."""

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        mla = super().expected(config)["mla"]
        return {"mla": attrs.evolve(mla, rope_interleave=True)}

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        if not file.flag("rope_interleave", True):
            file.problems.append("rope_interleave: only True is implemented, got False")
        return super().read(file, decoder)


FAMILY = register(
    Family(
        title="DeepSeek-V2",
        spec=DeepSeekV2,
        sizes=DEEPSEEK_V2,
        architecture="DeepseekV2ForCausalLM",
        classifier="DeepseekV2ForSequenceClassification",
        model_types=("deepseek_v2",),
        defaults=transformers_defaults(layers=32, embed=4096, mlp=11_008, heads=32, kv_heads=None, head_dim=None,
                                       vocab=102_400, length=2048, moe_intermediate_size=1407, n_shared_experts=2,
                                       n_routed_experts=64, num_experts_per_tok=None, q_lora_rank=None,
                                       kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        fixed={
            "attention_dropout": 0.0,
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "moe_layer_freq": 1,
        },
        ignored=("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "auto_map"),
        layers=LayerFields(mlp_bias=True),
        fields=(
            _MLA(),
            _Experts(others={}, norm_topk_prob=None, constants=_CONSTANTS, dense_layers=0, scale=1.0),
            MLARope(),
            TiedHead(),
        ),
    )
)  # fmt: skip
