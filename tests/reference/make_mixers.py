"""Makes the stored reference figures of sequence mixers with torch and transformers: layers alone, without a model.

Run it in an environment that has torch and transformers (figures stored here: torch 2.15, transformers 5.12; Mamba-2's:
torch 2.14, transformers 5.23):

    python tests/reference/make_mixers.py [NAME ...]

It writes tests/reference/mixers/<name>.npz with the layer's sizes (`config.*`), its weights as the Hub names them
(`weight.*`), inputs x [B, T, D], a direction c of the same shape, and transformers' float32 output `out`, the gradient
of sum(out * c) with respect to x (`to_x`), and with respect to each weight (`to.*`). Of DeepSeek-V3's attention also
the rotary tables sin and cos [T, R / 2] and the softmax scale; of Qwen3-Next's DeltaNet and of Nemotron-H's Mamba-2
also the output of the same rows with only the last `lengths` tokens, padded on their left, and the memory after the
last token.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DeepseekV3Config, DynamicCache, NemotronHConfig, Qwen3NextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

HERE = Path(__file__).parent / "mixers"
LATENT = {
    "latent_compressed": {
        "q_lora_rank": 12,
        "rope_interleave": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 0.7,  # not as mscale_all_dim, so that tables are scaled as well
            "mscale_all_dim": 1.2,
        },
    },
    "latent_direct": {
        "q_lora_rank": None,
        "rope_interleave": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}
DELTA = {
    # Two value heads a key head; more than a chunk of 64; padding that is not whole chunks.
    "delta_grouped": ({"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 6, "conv": 4}, 100, 11),
    # One value head a key head, another convolution, less than a chunk, and a wider key than value.
    "delta_single": ({"key_heads": 3, "value_heads": 3, "key_head_dim": 5, "value_head_dim": 7, "conv": 3}, 40, 23),
}
MAMBA = {
    # Two heads a group; more than a chunk of 64; padding that is not whole chunks; no limits of time steps.
    "mamba2_grouped": (
        {"num_heads": 4, "head_dim": 6, "state_size": 5, "n_groups": 2, "conv_kernel": 4},
        None,
        100,
        11,
    ),
    # A head a group, another convolution, less than a chunk, and time steps from 0.3 to 0.8.
    "mamba2_limits": (
        {"num_heads": 3, "head_dim": 4, "state_size": 7, "n_groups": 3, "conv_kernel": 3},
        (0.3, 0.8),
        40,
        23,
    ),
}
EMBED = 20


def redrawn(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A layer's parameters, all drawn anew, so that none that is left out or in the wrong place is hidden by a one."""
    result = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in result.items():
            if name == "A_log":  # memories that keep much, and some that keep little
                parameter.copy_(torch.log(torch.rand_like(parameter) * 2 + 0.02))
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 3:
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)
    return result


def write(
    name: str,
    config: dict[str, Any],
    weights: dict[str, torch.nn.Parameter],
    x: torch.Tensor,
    out: torch.Tensor,
    **others: Any,
) -> None:
    """Stores a layer, its inputs and outputs, and their gradients."""
    c = torch.randn_like(out)
    to_x, *to = torch.autograd.grad(torch.sum(out * c), [x, *weights.values()])
    arrays = {
        **{f"config.{key}": np.array(-1 if value is None else value) for key, value in config.items()},
        **{f"weight.{key}": value for key, value in weights.items()},
        **{f"to.{key}": value for key, value in zip(weights, to, strict=True)},
        "x": x,
        "c": c,
        "out": out,
        "to_x": to_x,
        **others,
    }
    HERE.mkdir(exist_ok=True)
    np.savez_compressed(
        HERE / f"{name}.npz",
        **{key: x.detach().numpy() if isinstance(x, torch.Tensor) else x for key, x in arrays.items()},
    )


def latent(name: str, fields: dict[str, Any]) -> None:
    """Attention of DeepSeek-V3, causal over whole rows."""
    sizes = {"kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 5}
    config = DeepseekV3Config(
        hidden_size=EMBED,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=128,
        attn_implementation="eager",
        **sizes,
        **fields,
    )
    layer = DeepseekV3Attention(config, 0).eval()
    weights = redrawn(layer)
    length = 24
    x = torch.randn(2, length, EMBED, requires_grad=True)
    cos, sin = DeepseekV3RotaryEmbedding(config)(x, torch.arange(length)[None])
    unseen = torch.full((length, length), float("-inf")).triu(1)[None, None]
    out = layer(x, (cos, sin), unseen)[0]
    half = sizes["qk_rope_head_dim"] // 2
    numbers = {**sizes, "q_lora_rank": fields["q_lora_rank"], "rope_interleave": fields["rope_interleave"]}
    tables = {"sin": sin[0, :, :half], "cos": cos[0, :, :half], "scale": np.float64(layer.scaling)}
    write(name, {**numbers, "num_heads": 3}, weights, x, out, **tables)


def delta(name: str, sizes: dict[str, int], length: int, short: int) -> None:
    """Gated DeltaNet of Qwen3-Next."""
    config = Qwen3NextConfig(
        hidden_size=EMBED,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=sizes["key_heads"],
        linear_num_value_heads=sizes["value_heads"],
        linear_key_head_dim=sizes["key_head_dim"],
        linear_value_head_dim=sizes["value_head_dim"],
        linear_conv_kernel_dim=sizes["conv"],
        rms_norm_eps=0.05,  # so large that the last digits of small outputs do not become first ones
    )
    layer = Qwen3NextGatedDeltaNet(config, 0).eval()
    weights = redrawn(layer)
    x = torch.randn(2, length, EMBED, requires_grad=True)
    out = layer(x)
    with torch.no_grad():
        cache = DynamicCache(config=config)
        layer(x, cache_params=cache)
        memory = cache.layers[0].recurrent_states
        mask = torch.ones(2, length)
        mask[1, : length - short] = 0
        padded = layer(x, attention_mask=mask) * mask[..., None]
    write(name, sizes, weights, x, out, memory=memory, padded=padded, lengths=np.array([length, short], np.int32))


def mamba(name: str, sizes: dict[str, int], limit: tuple[float, float] | None, length: int, short: int) -> None:
    """Mamba-2 of Nemotron-H."""
    config = NemotronHConfig(
        hidden_size=EMBED,
        layers_block_type=["linear_attention"],
        mamba_num_heads=sizes["num_heads"],
        mamba_head_dim=sizes["head_dim"],
        ssm_state_size=sizes["state_size"],
        n_groups=sizes["n_groups"],
        conv_kernel=sizes["conv_kernel"],
        chunk_size=32,
        layer_norm_epsilon=0.05,  # so large that the last digits of small outputs do not become first ones
    )
    layer = NemotronHMamba2Mixer(config, 0).eval()
    layer.time_step_limit = limit or (0.0, float("inf"))  # transformers 5.23 does not read `config.time_step_limit`
    weights = redrawn(layer)
    x = torch.randn(2, length, EMBED, requires_grad=True)
    out = layer(x)
    with torch.no_grad():
        cache = DynamicCache(config=config)
        layer(x, cache_params=cache)
        memory = cache.layers[0].recurrent_states[0].transpose(-1, -2)
        mask = torch.ones(2, length)
        mask[1, : length - short] = 0
        padded = layer(x, attention_mask=mask) * mask[..., None]
    limits = {} if limit is None else {"limit": np.array(limit)}
    lengths = np.array([length, short], np.int32)
    write(name, sizes, weights, x, out, memory=memory, padded=padded, lengths=lengths, **limits)


def main(names: list[str]) -> None:
    """Writes the layers of these names anew, all of them if there are none."""
    for seed, (name, fields) in enumerate(LATENT.items()):
        torch.manual_seed(seed)
        if not names or name in names:
            latent(name, fields)
    for of_kind, make in ((DELTA, delta), (MAMBA, mamba)):
        for seed, (name, inputs) in enumerate(of_kind.items()):
            torch.manual_seed(seed)
            if not names or name in names:
                make(name, *inputs)


if __name__ == "__main__":
    main(sys.argv[1:])
