"""Qwen3-Next: spec, the published size (Qwen Team, 2025), `config.json` and tensor names; no jax."""

# ruff: noqa: D102 - the methods are those of `Fields`

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig, Projections
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.config.tensors import MTPTensors
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import DenseLayers, Fields, Heads, MoE, SharedRope, TiedHead, with_num_experts
from nnxdsl.models.families.hf_config import LINEAR_KINDS, ConfigFile, layer_types
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Qwen3Next(Model):
    """Qwen3-Next (Qwen Team, 2025): three layers of four are gated DeltaNets (arXiv:2412.06464), all have experts.

    The state of a DeltaNet has a constant size. The other layers have gated attention, all have a shared expert.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.4 million parameters, for a laptop.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"mtp_layers"})

    size: Literal["tiny", "80b-a3b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_layers: int = attrs.field(default=0, validator=Limit(at_least=0, at_most=1))


CHOICES: dict[str, Any] = {
    "norm.scale": "zero_centred",
    "attention.query_key_norm": "head",
    "attention.output_gate": "query",
}
PARTIAL_ROTARY = 0.25


def _size(*, delta: tuple[int, int, int], experts: tuple[int, int, int], **numbers: Any) -> DecoderConfig:
    """A size, of DeltaNet's (key heads, value heads, their width), and (experts, experts of a token, their width)."""
    key_heads, value_heads, width = delta
    count, per_tok, mlp = experts
    return decoder(
        pattern=("linear", "linear", "linear", "global"),
        linear_attention=GatedDeltaNetConfig(
            key_heads=key_heads, value_heads=value_heads, key_head_dim=width, value_head_dim=width
        ),
        feed_forward=MoEConfig(
            num_experts=count,
            num_experts_per_tok=per_tok,
            mlp_dim=mlp,
            shared_expert_dim=mlp,
            shared_expert_gate=True,
        ),
        rope=Rope(theta=1e7, partial_rotary_factor=PARTIAL_ROTARY),
        tied_head=False,
        **CHOICES,
        **numbers,
    )


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
QWEN3_NEXT = {
    "tiny": _size(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, delta=(2, 4, 32), experts=(8, 2, 64),
                  vocab=320, length=1024),
    "80b-a3b": _size(layers=48, embed=2048, mlp=5120, heads=16, kv_heads=2, head_dim=256, delta=(16, 32, 128),
                     experts=(512, 10, 512), vocab=151_936, length=262_144),
}  # fmt: skip

_NUMBERS = {
    "linear_conv_kernel_dim": "conv_kernel",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
}


@attrs.frozen(kw_only=True)
class Mixers(Fields):
    """Layers with a gated DeltaNet among layers with attention: `full_attention_interval` or `layer_types`.

    Attributes:
        projections: of the gated DeltaNets.
    """

    projections: Projections = "joined"
    names: ClassVar[tuple[str, ...]] = ("full_attention_interval", "layer_types")
    decides: ClassVar[tuple[str, ...]] = ("layers.pattern",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        interval = file.count("full_attention_interval", 4, least=1)
        linear: tuple[LayerKind, ...] = ("linear",) * (interval - 1)
        pattern = file.pattern((*linear, "global"), LINEAR_KINDS)
        numbers = {ours: file.numbers[theirs] for theirs, ours in _NUMBERS.items()}
        delta = file.part(GatedDeltaNetConfig, **numbers, projections=self.projections)
        return {"layers.pattern": pattern, "linear_attention": delta if "linear" in pattern else None}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        assert config.linear_attention is not None  # or the decoder is refused
        numbers = {theirs: getattr(config.linear_attention, ours) for theirs, ours in _NUMBERS.items()}
        return {"layer_types": layer_types(config), **numbers}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        delta = config.linear_attention
        if not isinstance(delta, GatedDeltaNetConfig):
            delta = QWEN3_NEXT["80b-a3b"].linear_attention
        return {"linear_attention": attrs.evolve(delta, projections=self.projections)}


MTP = MTPTensors(
    around=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    prefix="mtp.",
    block_prefix="mtp.layers.0.",
    has_copies=False,
    is_default=True,
)
"""The names of the families that have these layers."""

_DEFAULTS = transformers_defaults(layers=48, embed=2048, mlp=5632, heads=16, kv_heads=2, head_dim=256, vocab=151_936,
                                  length=32_768, linear_conv_kernel_dim=4, linear_key_head_dim=128,
                                  linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
                                  moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512,
                                  num_experts_per_tok=10)  # fmt: skip

FAMILY = register(
    Family(
        title="Qwen3-Next",
        spec=Qwen3Next,
        sizes=QWEN3_NEXT,
        architecture="Qwen3NextForCausalLM",
        classifier="Qwen3NextForSequenceClassification",
        model_types=("qwen3_next",),
        choices=CHOICES,
        defaults=_DEFAULTS,
        fixed={
            "attention_dropout": 0.0,
        },
        fields=(
            Heads(),
            Mixers(),
            MoE(
                others={"shared_expert_intermediate_size": "shared_expert_dim"},
                norm_topk_prob=True,
                constants={"shared_expert_gate": True},
            ),
            DenseLayers(),
            SharedRope(partial_rotary_factor=PARTIAL_ROTARY),
            TiedHead(),
        ),
        prepare=with_num_experts,
        mtp=MTP,
    )
)
