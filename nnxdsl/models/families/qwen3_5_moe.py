"""Qwen3.5-MoE, of which 3.6 and 3.8 are: spec, the published sizes (Qwen Team, 2026) and spellings; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.families.family import Family, transformers_defaults
from nnxdsl.models.families.fields import Heads, MoE, TiedHead, with_num_experts
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.qwen3_5 import DELTA_DEFAULTS, FIXED, IGNORED, ROPE, deltanets
from nnxdsl.models.families.qwen3_next import CHOICES, MTP, Mixers
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Qwen35MoE(Model):
    """Qwen3.5-MoE, 3.6 and 3.8, text only (Qwen Team, 2026): gated DeltaNets, experts in all layers.

    As `Qwen35`, with experts and a shared expert.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.2 million parameters, for a laptop.
    """

    size: Literal["tiny", "35b-a3b", "122b-a10b", "397b-a17b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_layers: int = attrs.field(default=0, validator=Limit(at_least=0, at_most=1))


def _size(*, experts: tuple[int, int, int], **numbers: Any) -> DecoderConfig:
    """A size, of (experts, experts of a token, their width)."""
    count, per_tok, mlp = experts
    moe = MoEConfig(
        num_experts=count, num_experts_per_tok=per_tok, mlp_dim=mlp, shared_expert_dim=mlp, shared_expert_gate=True
    )
    return deltanets(mlp=mlp, feed_forward=moe, kv_heads=2, tied_head=False, **numbers)


# The text decoders as their published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
QWEN3_5_MOE = {
    "tiny": _size(layers=4, embed=128, heads=4, head_dim=32, delta=(2, 4), width=32, experts=(8, 2, 64), vocab=320,
                  length=1024),
    "35b-a3b": _size(layers=40, embed=2048, heads=16, delta=(16, 32), experts=(256, 8, 512)),
    "122b-a10b": _size(layers=48, embed=3072, heads=32, delta=(16, 64), experts=(256, 8, 1024)),
    "397b-a17b": _size(layers=60, embed=4096, heads=32, delta=(16, 64), experts=(512, 10, 1024)),
}  # fmt: skip


class _Experts(MoE):
    """Experts of all layers: a file has no width of an MLP, so that it is that of an expert here."""

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().read(file, decoder), "mlp.dim": file.numbers["moe_intermediate_size"]}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        expected = super().expected(config)
        return {**expected, "mlp.dim": expected["feed_forward"].mlp_dim}


FAMILY = register(
    Family(
        title="Qwen3.5-MoE",
        spec=Qwen35MoE,
        sizes=QWEN3_5_MOE,
        architecture="Qwen3_5MoeForCausalLM",
        model_types=("qwen3_5_moe_text",),
        wrappers=("qwen3_5_moe",),
        choices=CHOICES,
        defaults=transformers_defaults(layers=40, embed=2048, mlp=512, heads=16, kv_heads=2, head_dim=256,
                                       vocab=248_320, length=32_768, moe_intermediate_size=512,
                                       shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
                                       **DELTA_DEFAULTS),
        fixed=FIXED,
        ignored=IGNORED,
        fields=(
            Heads(),
            Mixers(projections="separate"),
            _Experts(
                others={"shared_expert_intermediate_size": "shared_expert_dim"}, constants={"shared_expert_gate": True}
            ),
            ROPE,
            TiedHead(),
        ),
        prepare=with_num_experts,
        mtp=MTP,
    )
)  # fmt: skip
