"""DeepSeek-V3.2: spec, the published size (DeepSeek-AI, arXiv:2512.02556), `config.json` and names; no jax."""

# ruff: noqa: D102 - the methods are those of `Fields`

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import IndexerStage, Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.indexer import IndexerConfig
from nnxdsl.models.families.deepseek_v3 import DEEPSEEK_V3, MLA, MLARope, TypedExperts
from nnxdsl.models.families.family import Family, transformers_defaults
from nnxdsl.models.families.fields import TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class DeepSeekV32(Model):
    """DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv:2512.02556): DeepSeek-V3 with sparse attention (DSA).

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.2 million parameters, for a laptop; a token attends to 32 others.
    """

    size: Literal["tiny", "671b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    indexer_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))
    indexer_stage: IndexerStage = "sparse"


def with_indexer(config: DecoderConfig, indexer: IndexerConfig) -> DecoderConfig:
    """A size with latent attention, to the tokens that an indexer selects."""
    assert config.mla is not None  # it has latent attention
    return attrs.evolve(config, mla=attrs.evolve(config.mla, indexer=indexer))


# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
DEEPSEEK_V32 = {
    "tiny": with_indexer(DEEPSEEK_V3["tiny"], IndexerConfig(num_heads=4, head_dim=32, topk=32)),
    "671b": with_indexer(DEEPSEEK_V3["671b"], IndexerConfig(num_heads=64, head_dim=128, topk=2048)),
}

NUMBERS = {"index_n_heads": "num_heads", "index_head_dim": "head_dim", "index_topk": "topk"}


@attrs.frozen(kw_only=True)
class SparseMLA(MLA):
    """Latent attention with an indexer in every layer, whose numbers are among the family's `defaults`.

    Attributes:
        interleaves: whether the indexer rotates pairs of neighbours; latent attention always does.
    """

    interleaves: bool
    names: ClassVar[tuple[str, ...]] = (*MLA.names, "layer_types", "indexer_rope_interleave")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        if not file.flag("rope_interleave", True):
            file.problems.append("rope_interleave: only true is implemented, got false")
        if file.flag("indexer_rope_interleave", self.interleaves) != self.interleaves:
            file.problems.append(
                f"indexer_rope_interleave: expected {str(self.interleaves).lower()}, as in transformers"
            )
        kinds = file.fields.get("layer_types")
        if kinds is not None and kinds != ["indexed_attention"] * file.numbers["num_hidden_layers"]:
            file.problems.append(f"layer_types: expected 'indexed_attention' for each layer, got {kinds!r}")
        decoder_fields, numbers = (
            super().read(file, decoder),
            {ours: file.numbers[name] for name, ours in NUMBERS.items()},
        )
        indexer = file.part(IndexerConfig, **numbers, rope_interleave=self.interleaves)
        if decoder_fields["mla"] is None or indexer is None:
            return decoder_fields
        return decoder_fields | {
            "mla": file.part(lambda **fields: attrs.evolve(decoder_fields["mla"], **fields), indexer=indexer)
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        mla, fields = config.mla, super().write(config)
        assert mla is not None  # or the decoder is refused
        assert mla.indexer is not None
        del fields["rope_interleave"]  # which transformers does not have here
        return fields | {theirs: getattr(mla.indexer, ours) for theirs, ours in NUMBERS.items()}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        mla = config.mla or DEEPSEEK_V32["671b"].mla
        assert mla is not None
        indexer = mla.indexer or IndexerConfig(num_heads=64, head_dim=128, topk=2048)
        indexer = attrs.evolve(indexer, rope_interleave=self.interleaves)
        return {"mla": attrs.evolve(mla, rope_interleave=True, indexer=indexer)}


FIXED = {
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
IGNORED = (
    *("aux_loss_alpha", "seq_aux"),  # the router's losses
    *("ep_size", "pretraining_tp"),  # how the work was split in training
    *("num_nextn_predict_layers", "num_mtp_layers"),  # layers beside the decoder
    "auto_map",
)

FAMILY = register(
    Family(
        title="DeepSeek-V3.2",
        spec=DeepSeekV32,
        sizes=DEEPSEEK_V32,
        architecture="DeepseekV32ForCausalLM",
        model_types=("deepseek_v32",),
        defaults=transformers_defaults(layers=61, embed=7168, mlp=18_432, heads=128, kv_heads=None, head_dim=None,
                                       vocab=129_280, length=163_840, moe_intermediate_size=2048, n_shared_experts=1,
                                       n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4,
                                       q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                                       v_head_dim=128, index_n_heads=64, index_head_dim=128, index_topk=2048),
        fixed=FIXED,
        ignored=IGNORED,
        fields=(SparseMLA(interleaves=False), TypedExperts(counts_dense=True), MLARope(), TiedHead()),
    )
)  # fmt: skip
