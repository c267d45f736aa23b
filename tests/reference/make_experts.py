"""Makes the stored reference figures of mixtures of experts with torch and transformers: blocks, gradients, and losses.

Run it in an environment that has torch and transformers (figures stored here: torch 2.15, transformers 5.12):

    python tests/reference/make_experts.py

It writes tests/reference/experts/<name>.npz: an input x [B, T, D] and a direction c of the same shape, every parameter
of transformers' block under its own name, all drawn at random, the block's output for x, and the gradients of
sum(output * c) with respect to x ("gradient:x") and to every parameter ("gradient:<name>"); all float32. balance.npz
has router logits of two layers [L, B, T, E], a mask [B, T], and transformers' load-balancing loss with and without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig, Qwen3NextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

HERE = Path(__file__).parent / "experts"
ROWS, TOKENS, EMBED, MLP, SHARED, COUNT, CHOSEN = 2, 9, 16, 12, 20, 8, 3


def mixtral() -> nn.Module:
    sizes = {"hidden_size": EMBED, "intermediate_size": MLP, "num_local_experts": COUNT, "num_experts_per_tok": CHOSEN}
    return MixtralSparseMoeBlock(eager(MixtralConfig(**sizes)))


def qwen3_moe(normalised: bool) -> nn.Module:
    sizes = {"hidden_size": EMBED, "moe_intermediate_size": MLP, "num_experts": COUNT, "num_experts_per_tok": CHOSEN}
    return Qwen3MoeSparseMoeBlock(eager(Qwen3MoeConfig(**sizes, norm_topk_prob=normalised)))


def gpt_oss() -> nn.Module:
    sizes = {"hidden_size": EMBED, "intermediate_size": MLP, "num_local_experts": COUNT, "num_experts_per_tok": CHOSEN}
    return GptOssMLP(eager(GptOssConfig(**sizes)))


def deepseek_v3(groups: int, chosen_groups: int) -> nn.Module:
    sizes = {"hidden_size": EMBED, "moe_intermediate_size": MLP, "n_routed_experts": COUNT}
    router = {"num_experts_per_tok": CHOSEN, "n_group": groups, "topk_group": chosen_groups, "norm_topk_prob": True}
    return DeepseekV3MoE(eager(DeepseekV3Config(**sizes, **router, n_shared_experts=2, routed_scaling_factor=2.5)))


def qwen3_next() -> nn.Module:
    sizes = {"hidden_size": EMBED, "moe_intermediate_size": MLP, "num_experts": COUNT, "num_experts_per_tok": CHOSEN}
    return Qwen3NextSparseMoeBlock(eager(Qwen3NextConfig(**sizes, shared_expert_intermediate_size=SHARED)))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": mixtral,
    "qwen3_moe": lambda: qwen3_moe(True),
    "qwen3_moe_as_scored": lambda: qwen3_moe(False),
    "gpt_oss": gpt_oss,
    "deepseek_v3": lambda: deepseek_v3(4, 2),
    "deepseek_v3_one_group": lambda: deepseek_v3(1, 1),
    "qwen3_next": qwen3_next,
}


def eager(config: object) -> object:
    """The configuration, with experts computed one after the other as the model's own file says."""
    config._experts_implementation = "eager"
    return config


def block(name: str) -> dict[str, np.ndarray]:
    """One block's parameters, input, output and gradients."""
    module = BLOCKS[name]().float()
    # A spread of 4 in the input sends GPT-OSS's gates beyond their limit of 7, some above, some below.
    x = (torch.randn(ROWS, TOKENS, EMBED) * (4 if name == "gpt_oss" else 1)).requires_grad_()
    direction = torch.randn(ROWS, TOKENS, EMBED)
    with torch.no_grad():
        # Kernels stand in either orientation: each is about EMBED wide on both sides.
        for _, parameter in (*module.named_parameters(), *module.named_buffers()):
            spread = EMBED**-0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn_like(parameter) * spread)
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad((output * direction).sum(), [x, *parameters.values()])
    return {
        "x": x.detach().numpy(),
        "c": direction.numpy(),
        "output": output.detach().numpy(),
        **{key: value.detach().numpy() for key, value in (*parameters.items(), *module.named_buffers())},
        **{f"gradient:{key}": value.numpy() for key, value in zip(["x", *parameters], gradients, strict=True)},
    }


def balance() -> dict[str, np.ndarray]:
    """Router logits and the loss that transformers makes of them."""
    logits = torch.randn(2, 3, 7, COUNT) * 2
    mask = (torch.arange(7)[None] < torch.tensor([7, 4, 2])[:, None]).long()
    flat = tuple(layer.reshape(-1, COUNT) for layer in logits)
    return {
        "logits": logits.numpy(),
        "mask": mask.numpy(),
        "masked": load_balancing_loss_func(flat, COUNT, CHOSEN, mask).numpy(),
        "unmasked": load_balancing_loss_func(flat, COUNT, CHOSEN).numpy(),
    }


def main() -> None:
    """Writes every file anew."""
    HERE.mkdir(exist_ok=True)
    for seed, name in enumerate(BLOCKS):
        torch.manual_seed(seed)
        np.savez_compressed(HERE / f"{name}.npz", **block(name))
    torch.manual_seed(len(BLOCKS))
    np.savez_compressed(HERE / "balance.npz", **balance())


if __name__ == "__main__":
    main()
