"""GLM-5: spec, the published sizes (GLM-5 Team, arXiv:2602.15763) and spellings; no jax."""

# ruff: noqa: D102 - the methods are those of `Fields`

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import IndexerStage, Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.indexer import IndexerConfig
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.deepseek_v3 import SCORING, MLARope, TypedExperts, mla_size
from nnxdsl.models.families.deepseek_v32 import FIXED, IGNORED, SparseMLA
from nnxdsl.models.families.family import Family, transformers_defaults
from nnxdsl.models.families.fields import TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class GLM5(Model):
    """GLM-5 to 5.2 (GLM-5 Team 2026, arXiv:2602.15763): latent and sparse attention as in DeepSeek-V3.2, experts.

    The experts are one group. The indexer rotates pairs of neighbours; in 5.2 layers share a selection.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.2 million parameters, for a laptop; a token attends to 32 others.
    """

    size: Literal["tiny", "744b", "5.2-744b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    indexer_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    indexer_stage: IndexerStage = "sparse"


_TYPES: dict[str, LayerKind] = {"full": "global", "shared": "shared_index"}
_LETTERS = {"F": "full", "S": "shared"}


def _without_head_dim(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields without one that transformers replaces with `qk_rope_head_dim`; GLM-5.2's file has another width there."""
    return {name: value for name, value in fields.items() if name != "head_dim"}


class IndexShare(SparseMLA):
    """Indexers in the layers that are "full"; one that is "shared" has the selection of the last of these before it.

    As in transformers, `indexer_types` goes before `index_topk_pattern`, and that before `index_topk_freq` with
    `index_skip_topk_offset`.
    """

    names: ClassVar[tuple[str, ...]] = (
        *SparseMLA.names,
        *("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    )

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers, (name, types) = file.numbers["num_hidden_layers"], _indexer_types(file)
        problem = None
        if not isinstance(types, Sequence) or len(types) != layers or any(one not in tuple(_TYPES) for one in types):
            problem = f"expected {layers} of 'full' and 'shared', got {types!r}"
        elif types[0] != "full":
            problem = "expected 'full' for the first layer, which has no selection before it to share"
        if problem is not None:
            file.problems.append(f"{name}: {problem}")
            types = ["full"]
        return super().read(file, decoder) | {"layers.pattern": tuple(_TYPES[one] for one in types)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        fields, letters = (
            super().write(config),
            ["S" if kind == "shared_index" else "F" for kind in config.layers.kinds],
        )
        if "S" not in letters:
            return fields
        # vLLM and SGLang read the letters, transformers the types.
        return fields | {"indexer_types": [_LETTERS[one] for one in letters], "index_topk_pattern": "".join(letters)}


def _indexer_types(file: ConfigFile) -> tuple[str, Any]:
    """The field that tells which layers have an indexer, and the type of each layer, as transformers reads them."""
    fields, layers = file.fields, file.numbers["num_hidden_layers"]
    if (types := fields.get("indexer_types")) is not None:
        return "indexer_types", types
    if (pattern := fields.get("index_topk_pattern")) is not None:
        letters = isinstance(pattern, str)
        return "index_topk_pattern", [_LETTERS.get(one, one) for one in pattern] if letters else pattern
    every, first = file.count("index_topk_freq", 1), file.count("index_skip_topk_offset", 2)
    is_full = [max(layer - first + 1, 0) % max(every, 1) == 0 for layer in range(layers)]
    return "index_topk_freq", ["full" if full else "shared" for full in is_full]


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
_PERIOD: tuple[LayerKind, ...] = ("global", "shared_index", "shared_index", "shared_index")
GLM5_SIZES["5.2-744b"] = GLM5_SIZES["744b"].with_fields(
    {
        "max_length": 1_048_576,
        "rope_global": Rope(theta=8e6),
        "layers.lead_pattern": ("global", "global", *_PERIOD),
        "layers.pattern": _PERIOD,
    }
)

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
        prepare=_without_head_dim,
        fixed={**FIXED, "moe_router_dtype": "float32"},
        ignored=(*IGNORED, "index_share_for_mtp_iteration"),
        fields=(
            IndexShare(interleaves=True),
            TypedExperts(counts_dense=True, shares_index=True),
            MLARope(),
            TiedHead(),
        ),
    )
)  # fmt: skip
