"""Makes the stored reference figures of the families with torch and transformers, of small random checkpoints.

Run it in an environment that has torch and transformers (figures stored here: torch 2.15, transformers 5.23):

    python tests/reference/make_families.py [NAME ...]

It writes tests/reference/families/<name>/ : a Hub directory (config.json and safetensors), every parameter drawn anew,
so that a norm, a bias or a sink that is left out shows; and expected.npz with

- tokens [B, T], lengths [B] (rows are right-padded) and transformers' float32 logits [B, T, V], zero on padding;
- loss, the mean of -log p over the tokens after the first of each row; norm, the length of its gradient;
- prompt and greedy: of the first `prompt` tokens of each row, the next tokens [B, N] that its own cache gives.

    python tests/reference/make_families.py check DIRECTORY NAME

loads a directory that we wrote, and prints the largest difference of its logits from those of the family; with `logits
DIRECTORY` it writes logits.npy for the rows of tokens.npy there.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "families"
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
}
# With fewer heads some pairs have scores of exactly zero, between which torch chooses in no order.
INDEXER = {"index_n_heads": 16, "index_head_dim": 10, "index_topk": 4}
QWEN3_MOE = {"num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
# Its norms amplify last digits with the usual 1e-6.
DELTA = {
    "rms_norm_eps": 0.05,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 16,
}
GLM4_MOE = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
}
GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    },
}
GEMMA4_EDGE = {
    **GEMMA4,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "rms_norm_eps": 0.05,  # eight layers with random scalars amplify last digits with the usual 1e-6
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 96,
}
# Its time steps have no least one, as in NVIDIA's code: transformers 5.23 takes `time_step_min`, which is for initial
# values, and not `time_step_limit` (pull request 48989).
NEMOTRON_H = {
    "layers_block_type": [{"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}[letter]
                          for letter in "MEM*EMEM*EM*E"],
    "num_hidden_layers": 13,
    "layer_norm_epsilon": 0.05,  # its norms amplify last digits with the usual 1e-5
    "time_step_min": 1e-12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 4,
    "ssm_state_size": 7,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
LLAMA4 = {
    "num_hidden_layers": 6,
    "intermediate_size": 16,
    "intermediate_size_mlp": 32,
    "num_local_experts": 4,
    "attention_chunk_size": 6,
    "floor_scale": 8,
    "attn_scale": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"num_key_value_heads": 1},
    # Scores and logits are small here, so are their caps.
    "gemma2": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "mistral": {"sliding_window": 6, "rms_norm_eps": 1e-5},
    "mistral_global": {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2": {"tie_word_embeddings": True, "head_dim": None, "hidden_size": 32},
    # The last three of five layers have a window: no period is shorter than the model.
    "qwen2_windows": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "hidden_size": 32},
    "qwen3": {"tie_word_embeddings": True, "rope_parameters": YARN},
    # Two dense layers before three with experts; queries compressed, and scores sharpened with YaRN.
    "deepseek_v3": {
        **LATENT,
        "q_lora_rank": 16,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "deepseek_v3_plain": {
        **LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "qwen3_moe_plain": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_next": {
        **DELTA,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 12,
    },
    "olmo3": {
        "hidden_size": 32,
        "sliding_window": 6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": YARN,
        },
        "head_dim": None,
    },
    # Every third layer sees everything, with a stretched wavelength of its own.
    "gemma3": {
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 12,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "rms_norm_eps": 1e-5,
    },
    "llama3_tied": {"tie_word_embeddings": True},
    # Dense layers among those with experts: in no order that repeats, and every second one.
    "qwen3_moe_dense_list": {**QWEN3_MOE, "mlp_only_layers": [1]},
    "qwen3_moe_dense_step": {**QWEN3_MOE, "decoder_sparse_step": 2},
    "qwen3_5": {**DELTA, "tie_word_embeddings": True},
    "qwen3_5_moe": {
        **DELTA,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 12,
    },
    # The best two of four groups, by their best expert; queries compressed, and scores sharpened with YaRN.
    "deepseek_v2": {
        **LATENT,
        "q_lora_rank": 16,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "deepseek_v2_lite": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "glm4_moe": {**GLM4_MOE, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "glm4_moe_plain": {**GLM4_MOE, "head_dim": None, "hidden_size": 32, "n_shared_experts": 2},
    "glm4_moe_lite": {
        **LATENT,
        "q_lora_rank": 16,
        "v_head_dim": 10,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    },
    "minimax_m2": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    # Global layers with wider heads, fewer of keys, and values that are the keys' projections.
    "gemma4": GEMMA4,
    "gemma4_moe": {
        **GEMMA4,
        "attention_k_eq_v": False,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
        "head_dim": None,
        "hidden_size": 32,
    },
    # Queries are sharper from the eighth token on.
    "ministral3": {"rope_parameters": {**YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}},
    # The best two of four groups by softmax, after one dense layer.
    "mistral4": {
        **LATENT,
        "q_lora_rank": 16,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "olmo_hybrid": {
        "rms_norm_eps": 0.05,
        "head_dim": None,
        "hidden_size": 32,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
    "phi3": {"sliding_window": 6, "head_dim": None, "hidden_size": 32},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1, 0], "tie_word_embeddings": True, "head_dim": None, "hidden_size": 32},
    # Embeddings of each layer; the second half of the layers reads the keys and values of layers 2 and 3, and has wider
    # MLPs.
    "gemma4_e2b": {
        **GEMMA4_EDGE,
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
    },
    # Shared from within a period: the last local layer comes after the last global one.
    "gemma4_e4b": {
        **GEMMA4_EDGE,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
    },
    # Chunks, every third layer without rotary positions, and every second one with experts.
    "llama4": {
        **LLAMA4,
        "no_rope_layer_interval": 3,
        "interleave_moe_layer_step": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    # As Maverick: no norms of queries and keys, and no scaled positions.
    "llama4_plain": {**LLAMA4, "no_rope_layer_interval": 2, "use_qk_norm": False, "num_hidden_layers": 4},
    # Two of the three rows, and no answer, are longer than the original length.
    "phi3_longrope": {
        "head_dim": None,
        "hidden_size": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 24,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.2, 1.5],
            "long_factor": [1.5, 3.0, 8.0],
        },
    },
    # Of 40 tokens the best four are attended to; queries compressed, and scores sharpened with YaRN.
    "deepseek_v32": {
        **LATENT,
        **INDEXER,
        "q_lora_rank": 16,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "glm_moe_dsa": {
        **LATENT,
        **INDEXER,
        "q_lora_rank": 16,
        "v_head_dim": 10,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    },
}
FAMILIES |= {
    # The first layers repeat, the last ones do not.
    "nemotron_h": NEMOTRON_H,
    # MLPs alone, as in Nemotron-H and Nemotron Nano 2.
    "nemotron_h_dense": {
        **NEMOTRON_H,
        "layers_block_type": None,
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M-M*-",
    },
    # Both, experts between projections of the tokens (Nemotron 3 Super), and no bias in the convolution.
    "nemotron_h_latent": {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "moe_latent_size": 12,
        "use_conv_bias": False,
    },
    # The first and the last of five layers have no window; epsilons are so large that each shows. The usual factor of
    # queries, 3.87, makes scores so sharp that they amplify last digits.
    "muse_glimmer": {
        "sliding_window": 6,
        "rms_norm_eps": 0.05,
        "post_norm_eps": 0.3,
        "qk_scale_factor": 1.7,
        "output_multiplier": 0.7,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
FAMILIES |= {
    # Biases of all linear layers, another activation, and a base of RoPE that grows from 16 tokens on.
    "llama3_biased": {
        "num_hidden_layers": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    },
    # Windows of the layers without rotary positions.
    "smollm3_windows": {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "use_sliding_window": True,
                        "sliding_window": 6, "attention_bias": True, "tie_word_embeddings": True},
    "deepseek_v2_biased": {**LATENT, "num_hidden_layers": 2, "first_k_dense_replace": 1, "q_lora_rank": 16,
                           "attention_bias": True, "mlp_bias": True, "topk_method": "greedy"},
    "nemotron_h_biased": {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "moe_latent_size": 12,
        "use_bias": True,
        "mlp_bias": True,
        "mlp_hidden_act": "gelu",
    },
    # As in GLM-5.2 two layers with experts share the selection of the dense one, before periods of three and a rest.
    "glm_moe_dsa_shared": {**LATENT, **INDEXER, "num_hidden_layers": 11, "q_lora_rank": 16, "n_routed_experts": 4,
                           "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                           "index_topk_freq": 3, "index_skip_topk_offset": 1,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}  # fmt: skip
BIASED: dict[str, Any] = {"attention_bias": True, "hidden_act": "gelu"}
# Fields that few files have; each is of the family of the same first word, and nothing of them is stored.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama3 relu": {"hidden_act": "relu"},
    "llama3 relu2": {"hidden_act": "relu2"},
    "qwen2 gelu": {"hidden_act": "gelu"},
    "qwen3 biased": BIASED,
    "qwen3_moe biased": BIASED,
    "qwen3_next biased": {**BIASED, "mlp_only_layers": [1]},
    "qwen3_5 biased": BIASED,
    "qwen3_5_moe biased": BIASED,
    "smollm3 windows": {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
                        "use_sliding_window": True, "sliding_window": 6, "mlp_bias": True},
    "granite biased": {**BIASED, "mlp_bias": True},
    "glm4_moe biased": BIASED,
    "glm4_moe_lite biased": BIASED,
    "glm_moe_dsa biased": BIASED,
    "deepseek_v2_lite biased": {**BIASED, "mlp_bias": True},
    "deepseek_v3 biased": BIASED,
    "deepseek_v32 biased": BIASED,
    "mistral gelu": {"hidden_act": "gelu"},
    "mistral4 biased": BIASED,
    "mixtral gelu": {"hidden_act": "gelu"},
    "minimax_m2 gelu": {"hidden_act": "gelu"},
    "gemma biased": {"attention_bias": True, "hidden_act": "relu"},
    "gemma2 biased": {"attention_bias": True, "hidden_activation": "gelu"},
    "gemma3 biased": {"attention_bias": True, "hidden_activation": "silu"},
    "gemma4_moe biased": {"attention_bias": True, "hidden_activation": "gelu"},
    "gemma4_e2b biased": {"attention_bias": True, "hidden_activation": "gelu"},
    "olmo3 biased": BIASED,
    "olmo_hybrid biased": BIASED,
    "olmo_hybrid wide values": {"linear_value_head_dim": 16},
    "llama4 biased": BIASED,
    "muse_glimmer biased": {"attention_bias": True, "hidden_activation": "gelu"},
    "gpt_oss limits": {"swiglu_limit": 0.5, "swiglu_alpha": 1.2, "attention_bias": False},
}  # fmt: skip
CLASSES = {
    "gpt_oss": "GptOss",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm_moe_dsa": "GlmMoeDsa",
    "minimax_m2": "MiniMaxM2",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "granite": "Granite",
    "llama3": "Llama",
    "llama4": "Llama4",
    "ministral3": "Ministral3",
    "olmo_hybrid": "OlmoHybrid",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
    "mistral": "Mistral",
    "mistral4": "Mistral4",
    "mixtral": "Mixtral",
    "nemotron_h": "NemotronH",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "olmo3": "Olmo3",
    "muse_glimmer": "MuseGlimmer",
}
ENCODERS: dict[str, dict[str, Any]] = {
    "MuseGlimmer": {
        "vision_config": {
            "num_hidden_layers": 1,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_attention_heads": 2,
            "patch_size": 2,
            "pos_emb_height": 2,
            "pos_emb_width": 2,
        },
        "out_hidden_size": 32,
        "projector_hidden_size": 8,
    }
}
"""By class, fields of encoders in families whose text decoder transformers has in a multimodal model alone."""
SEEDS = {"deepseek_v32": 101, "glm_moe_dsa": 105, "glm_moe_dsa_shared": 107, "muse_glimmer": 41}
"""Where the seed is not the family's number: that draws index scores that are nearly equal, or was another once."""
SCALES = {"gemma4_e2b": 0.5, "gemma4_e4b": 0.5, "olmo_hybrid": 0.5}
"""Scale of matrices where it is not 1, with which these models would enlarge a change of weights by 1e-7 to 1e-3."""
LENGTHS = (40, 25, 9)
PROMPT, NEW = 8, 12


def randomize(model: torch.nn.Module, scale: float = 1.0) -> None:
    """Every parameter, and every buffer that a checkpoint holds, gets values that a trained model might have."""
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if not values.is_floating_point():
                continue
            if name.endswith("mixer.A_log"):  # memories that keep much, and some that keep little
                values.copy_(torch.log(torch.rand_like(values) * 0.5 + 0.02))
            elif values.ndim == 1:  # norms, biases, sinks: about what they begin with, but not that
                first = 1.0 if bool((values == 1).all()) else 0.0
                values.copy_(first + torch.randn_like(values) * 0.3)
            elif "embed_tokens" in name or "lm_head" in name:
                values.copy_(torch.randn_like(values) * values.shape[-1] ** -0.5)
            else:
                values.copy_(torch.randn_like(values) * scale * values.shape[-1] ** -0.5)


def forward(model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, V]`; where RoPE depends on a length of each row by itself: its length then decides.

    Short rows come first: under dynamic scaling transformers keeps the base of the longest row so far.
    """
    config = model.config.get_text_config()
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") not in ("longrope", "dynamic"):
        return model(input_ids=tokens, attention_mask=mask.long()).logits
    size, rows = tokens.shape[1], {}
    for number in mask.sum(1).argsort().tolist():
        row = model(input_ids=tokens[number : number + 1, : mask[number].sum()]).logits[0]
        rows[number] = torch.nn.functional.pad(row, (0, 0, 0, size - len(row)))
    return torch.stack([rows[number] for number in range(len(tokens))])


@contextmanager
def selections() -> Iterator[list[float]]:
    """A list of how far the last chosen score and the first that is not are apart, of every query's selection."""
    gaps: list[float] = []
    topk = torch.Tensor.topk

    def recorded(scores: torch.Tensor, k: int, **kwargs: Any) -> Any:
        result = topk(scores, k, **kwargs)
        if scores.ndim == 3 and k == INDEXER["index_topk"] < scores.shape[-1]:  # an indexer's, not a router's
            last, following = topk(scores, k + 1, dim=-1).values[..., -2:].unbind(-1)
            has_more = following > torch.finfo(scores.dtype).min / 2
            if scores.shape[1] == max(LENGTHS):  # not of padding
                has_more &= torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
            gaps.extend((last - following)[has_more].tolist())
        return result

    torch.Tensor.topk = recorded
    try:
        yield gaps
    finally:
        torch.Tensor.topk = topk


def make(name: str, fields: dict[str, Any], seed: int) -> None:
    """Writes one family's directory anew; an indexer's choice must not hang on rounding."""
    with selections() as gaps:
        write(name, fields, seed)
    if "index_topk" in fields:
        print(f"{name}: {len(gaps)} selections, the nearest two scores {min(gaps):.1e} apart")
        assert min(gaps) > 1e-4, "change its seed"


def write(name: str, fields: dict[str, Any], seed: int) -> None:
    """Writes one family's directory."""
    torch.manual_seed(seed)
    family = CLASSES[max((kind for kind in CLASSES if name.startswith(kind)), key=len)]
    options = {key: value for key, value in {**SIZES, **fields}.items() if not (key == "head_dim" and value is None)}
    text = "Text" if hasattr(transformers, f"{family}TextConfig") and family not in ENCODERS else ""
    if family in ENCODERS:
        options = {"text_config": options, **ENCODERS[family]}
    config = getattr(transformers, f"{family}{text}Config")(**options, attn_implementation="eager")
    task = "ConditionalGeneration" if family in ENCODERS else "CausalLM"
    model = getattr(transformers, f"{family}For{task}")(config).eval()
    randomize(model, SCALES.get(name, 1.0))
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, SIZES["vocab_size"], (len(LENGTHS), max(LENGTHS)))
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    logits = forward(model, tokens, mask)
    logps = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]
    loss = -(logps * mask[:, 1:]).sum() / mask[:, 1:].sum()
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))
    with torch.no_grad():
        prompt = tokens[:, :PROMPT]
        real = torch.ones_like(prompt)  # else the padding's id would count as padding where it is a word
        greedy = model.generate(
            prompt, attention_mask=real, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )[:, PROMPT:]
    np.savez_compressed(
        directory / "expected.npz",
        tokens=tokens.numpy().astype(np.int32),
        lengths=np.array(LENGTHS, np.int32),
        logits=(logits * mask[..., None]).detach().numpy(),
        loss=np.float64(loss.item()),
        norm=np.float64(norm.item()),
        prompt=np.int32(PROMPT),
        greedy=greedy.numpy().astype(np.int32),
    )
    print(f"{name}: loss {loss.item():.4f}, gradient {norm.item():.4f}")


def loaded(directory: Path) -> torch.nn.Module:
    """The model of a directory in float32."""
    named = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, named).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def write_logits(directory: Path) -> None:
    """Writes the logits of the rows of tokens.npy, which have no padding."""
    tokens = torch.tensor(np.load(directory / "tokens.npy")).long()
    with torch.no_grad():
        logits = forward(loaded(directory), tokens, torch.ones_like(tokens).bool())
    np.save(directory / "logits.npy", logits.numpy())


def check(directory: Path, name: str) -> float:
    """How far the logits of a directory are from the figures of a family."""
    expected = np.load(HERE / name / "expected.npz")
    model = loaded(directory)
    mask = np.arange(expected["tokens"].shape[1])[None] < expected["lengths"][:, None]
    with torch.no_grad():
        logits = forward(model, torch.tensor(expected["tokens"]).long(), torch.tensor(mask))
    result = float(np.abs(logits.numpy() * mask[..., None] - expected["logits"]).max())
    print(type(model).__name__, result)
    return result


def main(names: list[str]) -> None:
    """Writes the families of these names, all of them if there are none."""
    seeds: Callable[[str], int] = list(FAMILIES).index
    for name in names or FAMILIES:
        make(name, FAMILIES[name], SEEDS.get(name, seeds(name)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["logits"]:
        write_logits(Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
