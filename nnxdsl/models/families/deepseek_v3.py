"""DeepSeek-V3: the published sizes (DeepSeek-AI, arXiv:2412.19437), and its spelling of `config.json`; no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nnxdsl.models.config.decoder import DecoderConfig, MLAConfig, MoEConfig, Rope, Yarn
from nnxdsl.models.families.hf_config import NUMBERS, USUAL, ConfigFile, Family, numbers_to_hf, rope_to_hf

# What tells a DeepSeek-V3 from other decoders.
_CHOICES: dict[str, Any] = {
    **USUAL,
    "window": None,
    "pattern": ("global",),
    "rope_local": None,
    "gated_deltanet": None,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
}


def _sharpened(width: int, factor: float, mscale_all_dim: float) -> float:
    """What scores are multiplied by: YaRN sharpens attention by `0.1 mscale_all_dim ln(factor) + 1`, twice."""
    sharper = 0.1 * mscale_all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
    return width**-0.5 * sharper * sharper


def _deepseek_v3(
    *, layers: int, dense: int, embed: int, mlp: int, heads: int, latent: MLAConfig, experts: MoEConfig, factor: float,
    before: int, vocab: int, length: int,
) -> DecoderConfig:  # fmt: skip
    return DecoderConfig(
        vocab_size=vocab,
        embed_dim=embed,
        mlp_dim=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=latent.qk_rope_head_dim,
        mla=latent,
        rope_global=Rope(
            theta=10_000.0, factor=factor, scaling=Yarn(original_max_position_embeddings=before, attention_factor=1.0)
        ),
        query_scale=_sharpened(latent.qk_head_dim, factor, 1.0),
        max_length=length,
        moe=experts,
        dense_layers=dense,
        tied_head=False,
        **_CHOICES,
    )


_SCORED: dict[str, Any] = {"scoring": "sigmoid", "e_score_correction_bias": True}
# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
DEEPSEEK_V3: dict[str, DecoderConfig] = {
    "tiny": _deepseek_v3(
        layers=4,
        dense=1,
        embed=128,
        mlp=384,
        heads=4,
        latent=MLAConfig(q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        experts=MoEConfig(
            num_experts=8,
            num_experts_per_tok=2,
            mlp_dim=64,
            shared_expert_dim=64,
            routed_scaling_factor=2.5,
            n_group=4,
            topk_group=2,
            **_SCORED,
        ),
        factor=4.0,
        before=256,
        vocab=320,
        length=1024,
    ),
    "671b": _deepseek_v3(
        layers=61,
        dense=3,
        embed=7168,
        mlp=18_432,
        heads=128,
        latent=MLAConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        experts=MoEConfig(
            num_experts=256,
            num_experts_per_tok=8,
            mlp_dim=2048,
            shared_expert_dim=2048,
            routed_scaling_factor=2.5,
            n_group=8,
            topk_group=4,
            **_SCORED,
        ),
        factor=40.0,
        before=4096,
        vocab=129_280,
        length=163_840,
    ),
}

# Defaults of transformers' DeepseekV3Config.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Fields that would change the mathematics, with the one value that is implemented.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
# Read below; how work was split when it was trained; the router's losses; and the layers that predict tokens further
# ahead, which stand beside the decoder.
_OTHERS = (
    "first_k_dense_replace",
    "routed_scaling_factor",
    "norm_topk_prob",
    "rope_interleave",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "qk_head_dim",
    "num_local_experts",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "pretraining_tp",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "output_router_logits",
    "router_aux_loss_coef",
    "auto_map",
)


def _read(fields: Mapping[str, Any]) -> DecoderConfig:
    """Reads both spellings of RoPE; a `q_lora_rank` of null is no compression of queries."""
    file = ConfigFile("DeepSeek-V3", fields)
    numbers = file.numbers(_DEFAULTS, _FIXED, _OTHERS)
    heads, turned = numbers["num_attention_heads"], numbers["qk_rope_head_dim"]
    if numbers["num_key_value_heads"] not in (None, heads):
        file.problems.append(f"num_key_value_heads: expected {heads}, as there are queries, or null")
    follows = {"head_dim": turned, "qk_head_dim": numbers["qk_nope_head_dim"] + turned}
    for name, wanted in follows.items():
        if fields.get(name) not in (None, wanted):
            file.problems.append(
                f"{name}: expected {wanted}, which follows from qk_rope_head_dim, got {fields[name]!r}"
            )
    numbers |= {"num_key_value_heads": heads, "head_dim": turned}
    rope = file.one_rope()
    latent = file.part(
        MLAConfig,
        q_lora_rank=numbers["q_lora_rank"] if "q_lora_rank" in fields else 1536,
        kv_lora_rank=numbers["kv_lora_rank"],
        qk_nope_head_dim=numbers["qk_nope_head_dim"],
        qk_rope_head_dim=turned,
        v_head_dim=numbers["v_head_dim"],
        rope_interleave=file.flag("rope_interleave", True),
    )
    entry = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    sharper = entry.get("mscale_all_dim") or 0.0 if isinstance(entry, Mapping) and rope.scaling is not None else 0.0
    return file.decoder(
        mla=latent,
        rope_global=rope,
        query_scale=_sharpened(numbers["qk_nope_head_dim"] + turned, rope.factor, sharper),
        moe=file.experts(
            num_experts=numbers["n_routed_experts"],
            num_experts_per_tok=numbers["num_experts_per_tok"],
            mlp_dim=numbers["moe_intermediate_size"],
            shared_expert_dim=numbers["n_shared_experts"] * numbers["moe_intermediate_size"],
            norm_topk_prob=file.flag("norm_topk_prob", True),
            routed_scaling_factor=file.number("routed_scaling_factor", 2.5),
            n_group=numbers["n_group"],
            topk_group=numbers["topk_group"],
            **_SCORED,
        ),
        dense_layers=file.count("first_k_dense_replace", 3),
        tied_head=file.flag("tie_word_embeddings", False),
        **{ours: numbers[theirs] for theirs, ours in NUMBERS.items()},
        **_CHOICES,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    latent, experts = config.mla, config.moe
    assert latent is not None  # or it is refused
    assert experts is not None
    assert experts.shared_expert_dim is not None
    rope = rope_to_hf(config.rope_global)
    factor = config.rope_global.factor
    if isinstance(config.rope_global.scaling, Yarn) and factor > 1:
        sharper = (config.query_scale * latent.qk_head_dim**0.5) ** 0.5
        rope["rope_scaling"] |= {"mscale_all_dim": round((sharper - 1) / (0.1 * math.log(factor)), 9) or None}
    return {
        "model_type": "deepseek_v3",
        **numbers_to_hf(config),
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_interleave": latent.rope_interleave,
        "first_k_dense_replace": config.dense_layers,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.mlp_dim,
        "n_shared_experts": experts.shared_expert_dim // experts.mlp_dim,
        "n_group": experts.n_group,
        "topk_group": experts.topk_group,
        "norm_topk_prob": experts.norm_topk_prob,
        "routed_scaling_factor": experts.routed_scaling_factor,
        **({"num_nextn_predict_layers": config.mtp_layers} if config.mtp_layers else {}),
        **rope,
        "tie_word_embeddings": config.tied_head,
        **_FIXED,
    }


def _derived(config: DecoderConfig) -> dict[str, object]:
    """It has latent attention, and experts beside a shared one whose width is that of so many of them."""
    latent = config.mla or DEEPSEEK_V3["671b"].mla
    given = config.moe or MoEConfig(num_experts=256, num_experts_per_tok=8, mlp_dim=2048)
    count = max((given.shared_expert_dim or 0) // given.mlp_dim, 1)
    experts = MoEConfig(
        num_experts=given.num_experts,
        num_experts_per_tok=given.num_experts_per_tok,
        mlp_dim=given.mlp_dim,
        shared_expert_dim=count * given.mlp_dim,
        norm_topk_prob=given.norm_topk_prob,
        routed_scaling_factor=given.routed_scaling_factor,
        n_group=given.n_group,
        topk_group=given.topk_group,
        **_SCORED,
    )
    return {"mla": latent, "moe": experts}


FAMILY = Family(
    title="DeepSeek-V3",
    architecture="DeepseekV3ForCausalLM",
    model_types=("deepseek_v3",),
    choices=_CHOICES,
    read=_read,
    write=_write,
    derived=_derived,
    further=True,
)
