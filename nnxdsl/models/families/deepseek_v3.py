"""DeepSeek-V3: spec, the published sizes (DeepSeek-AI, arXiv:2412.19437), `config.json` and names; no jax."""

# ruff: noqa: D102 - the methods are those of `Fields`

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind, dense_fields
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import Rope, Yarn
from nnxdsl.models.config.tensors import MTPTensors
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, MoE, SharedRope, TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class DeepSeekV3(Model):
    """DeepSeek-V3, of which R1 is one (DeepSeek-AI 2024, arXiv:2412.19437): latent attention, experts in groups.

    Multi-head latent attention (MLA); the experts have sigmoid scores with a bias correction, and a shared one beside
    them; dense layers first.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.1 million parameters, for a laptop.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"mtp_layers"})

    size: Literal["tiny", "671b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    mtp_layers: int = attrs.field(default=0, validator=Limit(at_least=0, at_most=1))


SCORING: dict[str, Any] = {"scoring": "sigmoid", "e_score_correction_bias": True}


def score_scale(width: int, factor: float, mscale_all_dim: float) -> float:
    """The factor of attention scores: with YaRN it has the square of `0.1 mscale_all_dim ln(factor) + 1`."""
    mscale = 0.1 * mscale_all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
    return width**-0.5 * mscale * mscale


def mla_size(
    *,
    heads: int,
    mla: MLAConfig,
    moe: MoEConfig,
    theta: float = 10_000.0,
    factor: float = 1.0,
    original: int = 4096,
    beta_fast: float = 32.0,
    mscale: float = 1.0,
    **numbers: Any,
) -> DecoderConfig:
    """A size with latent attention and experts; `factor` and what follows it are those of YaRN."""
    scaling = None
    if factor > 1:
        scaling = Yarn(original_max_position_embeddings=original, attention_factor=1.0, beta_fast=beta_fast)
    return decoder(
        heads=heads,
        kv_heads=heads,
        head_dim=mla.qk_rope_head_dim,
        mla=mla,
        rope=Rope(theta=theta, factor=factor, scaling=scaling),
        query_scale=score_scale(mla.qk_head_dim, factor, mscale),
        feed_forward=moe,
        tied_head=False,
        **numbers,
    )


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
DEEPSEEK_V3 = {
    "tiny": mla_size(
        layers=4,
        dense_layers=1,
        embed=128,
        mlp=384,
        heads=4,
        mla=MLAConfig(q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        moe=MoEConfig(
            num_experts=8,
            num_experts_per_tok=2,
            mlp_dim=64,
            shared_expert_dim=64,
            routed_scaling_factor=2.5,
            n_group=4,
            topk_group=2,
            **SCORING,
        ),
        factor=4.0,
        original=256,
        vocab=320,
        length=1024,
    ),
    "671b": mla_size(
        layers=61,
        dense_layers=3,
        embed=7168,
        mlp=18_432,
        heads=128,
        mla=MLAConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        moe=MoEConfig(
            num_experts=256,
            num_experts_per_tok=8,
            mlp_dim=2048,
            shared_expert_dim=2048,
            routed_scaling_factor=2.5,
            n_group=8,
            topk_group=4,
            **SCORING,
        ),
        factor=40.0,
        original=4096,
        vocab=129_280,
        length=163_840,
    ),
}


@attrs.frozen(kw_only=True)
class MLA(Fields):
    """Latent attention; `head_dim` is the width of its rotary part.

    Attributes:
        q_lora_rank: transformers' default.
    """

    q_lora_rank: int = 1536

    names: ClassVar[tuple[str, ...]] = ("rope_interleave", "qk_head_dim")
    decides: ClassVar[tuple[str, ...]] = ("mla",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        numbers, fields = file.numbers, file.fields
        heads, rotary = numbers["num_attention_heads"], numbers["qk_rope_head_dim"]
        if numbers["num_key_value_heads"] not in (None, heads):
            file.problems.append(f"num_key_value_heads: expected {heads}, as there are queries, or null")
        follows = {"head_dim": rotary, "qk_head_dim": numbers["qk_nope_head_dim"] + rotary}
        for name, wanted in follows.items():
            if fields.get(name) not in (None, wanted):
                file.problems.append(
                    f"{name}: expected {wanted}, which follows from qk_rope_head_dim, got {fields[name]!r}"
                )
        mla = file.part(
            MLAConfig,
            q_lora_rank=numbers["q_lora_rank"] if "q_lora_rank" in fields else self.q_lora_rank,  # null is none
            **{name: numbers[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
            rope_interleave=file.flag("rope_interleave", True),
        )
        return {"mla": mla, "num_kv_heads": heads, "head_dim": rotary}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        assert config.mla is not None  # or the decoder is refused
        numbers = attrs.asdict(config.mla, recurse=False)
        return {name: value for name, value in numbers.items() if name not in ("norm_eps", "indexer")}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        mla = config.mla or DEEPSEEK_V3["671b"].mla
        return {"mla": mla and attrs.evolve(mla, indexer=None)}


class MLARope(SharedRope):
    """Rotary positions, whose YaRN also changes the factor of attention scores."""

    decides: ClassVar[tuple[str, ...]] = ("rope_global", "attention.query_scale")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().read(file, decoder)
        rope: Rope = fields["rope_global"]
        entry = file.fields.get("rope_parameters") or file.fields.get("rope_scaling") or {}
        is_yarn = isinstance(entry, Mapping) and isinstance(rope.scaling, Yarn)
        mscale = entry.get("mscale_all_dim") or 0.0 if is_yarn else 0.0
        width = file.numbers["qk_nope_head_dim"] + file.numbers["qk_rope_head_dim"]
        return {**fields, "attention.query_scale": score_scale(width, rope.factor, mscale)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        assert config.mla is not None  # or the decoder is refused
        rope, factor = super().write(config), config.rope_global.factor
        if isinstance(config.rope_global.scaling, Yarn) and factor > 1:
            mscale = (config.attention.query_scale * config.mla.qk_head_dim**0.5) ** 0.5
            rope["rope_scaling"] |= {"mscale_all_dim": round((mscale - 1) / (0.1 * math.log(factor)), 9) or None}
        return rope


@attrs.frozen(kw_only=True)
class Experts(MoE):
    """Experts in groups, behind dense layers, beside shared experts whose widths add up.

    Attributes:
        dense_layers: transformers' default of `first_k_dense_replace`.
        scale: transformers' default of `routed_scaling_factor`.
    """

    count: str = "n_routed_experts"
    others: Mapping[str, str] = attrs.Factory(lambda: {"n_group": "n_group", "topk_group": "topk_group"})
    norm_topk_prob: bool | None = True
    constants: Mapping[str, Any] = attrs.Factory(lambda: SCORING)
    dense_layers: int = 3
    scale: float = 2.5
    names: ClassVar[tuple[str, ...]] = (*MoE.names, "first_k_dense_replace", "routed_scaling_factor")
    decides: ClassVar[tuple[str, ...]] = ("feed_forward", "layers.dense_layers")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().read(file, decoder),
            "layers.dense_layers": file.count("first_k_dense_replace", self.dense_layers),
        }

    def values(self, file: ConfigFile) -> dict[str, Any]:
        return {
            **super().values(file),
            "shared_expert_dim": file.numbers["n_shared_experts"] * file.numbers["moe_intermediate_size"],
            "routed_scaling_factor": file.number("routed_scaling_factor", self.scale),
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        moe = config.moe
        assert moe is not None  # or the decoder is refused
        return {
            **super().write(config),
            "n_shared_experts": (moe.shared_expert_dim or 0) // moe.mlp_dim,
            "routed_scaling_factor": moe.routed_scaling_factor,
            "first_k_dense_replace": config.layers.dense_layers,
            **({"num_nextn_predict_layers": config.mtp_layers} if config.mtp_layers else {}),
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        moe = config.moe or MoEConfig(num_experts=256, num_experts_per_tok=8, mlp_dim=2048)
        count = max((moe.shared_expert_dim or 0) // moe.mlp_dim, 1)
        names = self.numbers.values() if self.norm_topk_prob is None else (*self.numbers.values(), "norm_topk_prob")
        values = {ours: getattr(moe, ours) for ours in names}
        factor = moe.routed_scaling_factor
        values |= {"shared_expert_dim": count * moe.mlp_dim, "routed_scaling_factor": factor, **self.constants}
        return {"feed_forward": MoEConfig(**values)}


_TYPES = {"dense": True, "sparse": False}


@attrs.frozen(kw_only=True)
class TypedExperts(Experts):
    """Experts of the layers that `mlp_layer_types` names.

    Attributes:
        counts_dense: whether without it those after `first_k_dense_replace` have them, of which transformers knows
            nothing in other families; else all but the first.
        shares_index: whether layers may share the selection of an earlier one; all others are global.
    """

    counts_dense: bool = False
    shares_index: bool = False
    names: ClassVar[tuple[str, ...]] = (*Experts.names, "mlp_layer_types")
    decides: ClassVar[tuple[str, ...]] = (
        "feed_forward",
        *("layers.pattern", "layers.lead_pattern", "layers.dense_layers", "layers.dense_pattern"),
    )

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers, fields = file.numbers["num_hidden_layers"], super().read(file, decoder)
        dense = min(fields["layers.dense_layers"], layers) if self.counts_dense else 1
        types = file.fields.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (layers - dense)
        if not isinstance(types, Sequence) or len(types) != layers or any(one not in tuple(_TYPES) for one in types):
            file.problems.append(f"mlp_layer_types: expected {layers} of 'dense' and 'sparse', got {types!r}")
            return fields
        if "sparse" not in types:
            file.problems.append("mlp_layer_types: expected a layer that is 'sparse'")
            return fields
        pattern = decoder["layers.pattern"]
        kinds: list[LayerKind] = [pattern[layer % len(pattern)] for layer in range(layers)]
        return fields | dense_fields(kinds, [_TYPES[name] for name in types])

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        fields = super().write(config)
        del fields["first_k_dense_replace"]  # the types are read first
        return {**fields, "mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in config.dense]}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        if all(config.dense):
            return super().expected(config)
        shares = [self.shares_index and kind == "shared_index" for kind in config.layers.kinds]
        kinds: list[LayerKind] = ["shared_index" if is_shared else "global" for is_shared in shares]
        return super().expected(config) | dense_fields(kinds, config.dense)


_DEFAULTS = transformers_defaults(layers=61, embed=7168, mlp=18_432, heads=128, kv_heads=None, head_dim=None,
                                  vocab=129_280, length=4096, moe_intermediate_size=2048, n_shared_experts=1,
                                  n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
                                  q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                                  v_head_dim=128)  # fmt: skip

FAMILY = register(
    Family(
        title="DeepSeek-V3",
        spec=DeepSeekV3,
        sizes=DEEPSEEK_V3,
        architecture="DeepseekV3ForCausalLM",
        classifier="DeepseekV3ForSequenceClassification",
        model_types=("deepseek_v3",),
        defaults=_DEFAULTS,
        fixed={
            "attention_dropout": 0.0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        ignored=(
            *("aux_loss_alpha", "seq_aux"),  # the router's losses
            *("ep_size", "pretraining_tp"),  # how the work was split in training
            *("num_nextn_predict_layers", "num_mtp_layers"),  # layers beside the decoder
            "auto_map",
        ),
        fields=(
            MLA(),
            Experts(),
            MLARope(),
            TiedHead(),
        ),
        mtp=MTPTensors(),
    )
)
