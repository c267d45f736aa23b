"""Makes the stored figures of a layer that predicts the token after the next one, with torch and transformers.

Run it in an environment that has torch and transformers (figures stored here: torch 2.15, transformers 5.12):

    python tests/reference/make_mtp.py

transformers leaves these layers out. Their block is one of its own decoder layers; what stands around it is written
here after vLLM's deepseek_mtp.py and qwen3_next_mtp.py. It writes tests/reference/mtp/<name>/ : a Hub directory
(config.json and safetensors with the layer's tensors as published ones have them), every parameter drawn anew, so that
a norm that is left out shows; and expected.npz with

- tokens [B, T], lengths [B] (rows are right-padded), targets [B, T] (which tokens are learnt from);
- logits [B, T, V], float32, of the token after the next one; zero where there is none in the row;
- loss, the mean of -log p over the targets after the first token of each row; mtp_loss, the mean over those after the
  second, predicted two tokens before; norm, the length of the gradient of loss + weight * mtp_loss;
- to.*, that gradient with respect to some of the tensors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_families import FAMILIES, LATENT, SIZES, YARN, randomize
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

HERE = Path(__file__).parent / "mtp"
LAYERS, WEIGHT = 3, 0.3
LENGTHS = (20, 13, 3, 2)
DEEPSEEK = {
    **SIZES,
    **LATENT,
    "num_hidden_layers": LAYERS + 1,  # the last one is the block
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
}


QWEN = {
    **SIZES,
    **FAMILIES["qwen3_next"],
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],  # the last one is the block
}
# What Qwen3-Next calls what stands around the block.
NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


class Around(torch.nn.Module):
    """What stands around the block."""

    def __init__(self, width: int, norm: Any) -> None:
        super().__init__()
        self.enorm, self.hnorm = norm(width), norm(width)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.shared_head = torch.nn.ModuleDict({"norm": norm(width)})


def further(model: Any, block: Any, around: Any, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [T - 1, V] of the token after the next one, of one row without padding."""
    following = model.model.embed_tokens(tokens[None, 1:])
    x = around.eh_proj(torch.cat([around.enorm(following), around.hnorm(states[None, :-1])], dim=-1))
    unseen = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
    turned = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
    x = block(x, attention_mask=unseen, position_embeddings=turned)
    return model.lm_head(around.shared_head["norm"](x))[0]


def deepseek() -> None:
    """DeepSeek-V3: a dense layer, two with experts, and the one behind them."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **{name: value for name, value in DEEPSEEK.items() if name != "head_dim"}, attn_implementation="eager"
    )
    model = DeepseekV3ForCausalLM(config).eval()
    around = Around(config.hidden_size, lambda width: DeepseekV3RMSNorm(width, eps=config.rms_norm_eps))
    randomize(model)
    randomize(around)
    directory = HERE / "deepseek_v3"
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    prefix = f"model.layers.{LAYERS}."
    tensors = load_file(directory / "model.safetensors")
    tensors |= {prefix + name: value.detach() for name, value in around.named_parameters()}
    tensors[prefix + "embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    tensors[prefix + "shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    block = model.model.layers[LAYERS]
    model.config.num_hidden_layers = LAYERS  # so many are run
    figures(directory, model, block, around)


def qwen() -> None:
    """Qwen3-Next: a gated DeltaNet, a layer with attention, and one with attention behind them."""
    torch.manual_seed(1)
    config = Qwen3NextConfig(**QWEN, attn_implementation="eager")
    model = Qwen3NextForCausalLM(config).eval()
    around = Around(config.hidden_size, lambda width: Qwen3NextRMSNorm(width, eps=config.rms_norm_eps))
    randomize(model)
    randomize(around)
    directory = HERE / "qwen3_next"
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"num_hidden_layers": 2, "layer_types": QWEN["layer_types"][:2]}
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    tensors = load_file(directory / "model.safetensors")
    tensors = {name.replace("model.layers.2.", "mtp.layers.0."): value for name, value in tensors.items()}
    for name, value in around.named_parameters():
        tensors[f"mtp.{NAMES[name.removesuffix('.weight')]}.weight"] = value.detach()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.num_hidden_layers = 2  # so many are run
    figures(directory, model, model.model.layers[2], around)


def figures(directory: Path, model: Any, block: Any, around: Any) -> None:
    """Writes what comes of some rows."""
    size, vocab_size = max(LENGTHS), SIZES["vocab_size"]
    tokens = torch.randint(0, vocab_size, (len(LENGTHS), size))
    targets = (torch.rand(tokens.shape) < 0.6) & (torch.arange(size)[None] < torch.tensor(LENGTHS)[:, None])
    targets[:, 1] = True
    logits = torch.zeros(*tokens.shape, vocab_size)
    losses: list[torch.Tensor] = []
    further_losses: list[torch.Tensor] = []
    for row, length in enumerate(LENGTHS):
        ours, counted = tokens[row, :length], targets[row, :length]
        states = model.model(input_ids=ours[None]).last_hidden_state[0]
        logps = torch.log_softmax(model.lm_head(states[:-1]), -1).gather(-1, ours[1:, None])[:, 0]
        losses.append(-logps[counted[1:]])
        said = further(model, block, around, states, ours)
        logits[row, : length - 1] = said
        logps = torch.log_softmax(said[:-1], -1).gather(-1, ours[2:, None])[:, 0]
        further_losses.append(-logps[counted[2:]])
    loss, mtp_loss = torch.cat(losses).mean(), torch.cat(further_losses).mean()
    (loss + WEIGHT * mtp_loss).backward()
    parameters = {**dict(model.named_parameters()), **dict(around.named_parameters())}
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in parameters.values() if p.grad is not None))
    asked = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "model.norm.weight")
    np.savez_compressed(
        directory / "expected.npz",
        tokens=tokens.numpy().astype(np.int32),
        lengths=np.array(LENGTHS, np.int32),
        targets=targets.numpy(),
        logits=logits.detach().numpy(),
        loss=np.float64(loss.item()),
        mtp_loss=np.float64(mtp_loss.item()),
        weight=np.float64(WEIGHT),
        norm=np.float64(norm.item()),
        **{f"to.{name}": parameters[name].grad.numpy() for name in asked},
    )
    print(f"{directory.name}: loss {loss.item():.4f}, {mtp_loss.item():.4f}, gradient {norm.item():.4f}")


if __name__ == "__main__":
    deepseek()
    qwen()
