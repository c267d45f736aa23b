"""Kimi K2 to K2.6 and Moonlight: spec and the published sizes (Moonshot AI, 2025); DeepSeek-V3's files; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.families import deepseek_v3
from nnxdsl.models.families.deepseek_v3 import SCORING, mla_size
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Kimi(Model):
    """Kimi K2 (Kimi Team 2025, arXiv:2507.20534) to K2.6, text only, and Moonlight (arXiv:2502.16982).

    DeepSeek-V3's architecture; K2.5 and K2.6 are as k2-thinking.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.2 million parameters, for a laptop. "k2" has a context of 131,072
            tokens; "k2-thinking", of which K2.5 and K2.6 are, one of 262,144.
    """

    size: Literal["tiny", "moonlight-16b-a3b", "k2", "k2-thinking"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


_WIDTHS: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_k2 = partial(
    mla_size, layers=61, dense_layers=1, embed=7168, mlp=18_432, heads=64, vocab=163_840, theta=50_000.0,
    mla=MLAConfig(q_lora_rank=1536, **_WIDTHS),
    moe=MoEConfig(num_experts=384, num_experts_per_tok=8, mlp_dim=2048, shared_expert_dim=2048,
                  routed_scaling_factor=2.827, **SCORING),
)  # fmt: skip

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
KIMI = {
    "tiny": mla_size(
        layers=4, dense_layers=1, embed=128, mlp=384, heads=4, vocab=320, length=1024, theta=50_000.0,
        mla=MLAConfig(kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        moe=MoEConfig(num_experts=8, num_experts_per_tok=2, mlp_dim=64, shared_expert_dim=128,
                      routed_scaling_factor=2.446, **SCORING),
    ),
    "moonlight-16b-a3b": mla_size(
        layers=27, dense_layers=1, embed=2048, mlp=11_264, heads=16, vocab=163_840, length=8192, theta=50_000.0,
        norm_eps=1e-5, mla=MLAConfig(**_WIDTHS),
        moe=MoEConfig(num_experts=64, num_experts_per_tok=6, mlp_dim=1408, shared_expert_dim=2816,
                      routed_scaling_factor=2.446, **SCORING),
    ),
    "k2": _k2(factor=32.0, beta_fast=1.0, length=131_072),
    "k2-thinking": _k2(factor=64.0, length=262_144, norm_eps=1e-5),
}  # fmt: skip

FAMILY = register(
    attrs.evolve(
        deepseek_v3.FAMILY,
        title="Kimi",
        spec=Kimi,
        sizes=KIMI,
        model_types=("deepseek_v3", "kimi_k2"),
        wrappers=("kimi_k25",),
        mtp=None,
    )
)
