"""Trains a small checkpoint of a family for a few steps with torch and transformers, from the published formulas alone.

    python tests/reference/train_families.py DIRECTORY ROWS OUT [ADAPTER]

DIRECTORY is a checkpoint as transformers saves it and ROWS a JSON file with the rows of every step: texts as lists of
token ids for SFT, or objects with `prompt`, `chosen` and `rejected` for DPO (Rafailov et al. 2023, beta 0.1). ADAPTER
is an adapter file of PEFT's whose A and B are trained in place of the model (Hu et al. 2021, alpha / rank 2); the
reference of DPO is then the model without it, else the model as it was. Steps are AdamW's (torch's own, learning rate
1e-3, eps 1e-4, no weight decay) after clipping the gradient to a global norm of 1. Rows are computed one at a time,
without padding. OUT, a directory, gets `figures.json` (loss and gradient norm of each step) and the weights as they are
then: a checkpoint, or the adapter's file. Nothing of nnxdsl is imported here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

BETA, LR, CLIP, SCALE = 0.1, 1e-3, 1.0, 2.0


class LoRALinear(torch.nn.Module):
    """y = W x + scale B A x."""

    def __init__(self, inner: torch.nn.Module, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.a, self.b = inner, torch.nn.Parameter(a), torch.nn.Parameter(b)

    def __getattr__(self, name: str) -> Any:
        """Some layers read the weight's dtype or the width of a layer that they call."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer with its adapter."""
        return self.inner(x) + SCALE * ((x @ self.a.T) @ self.b.T)


def load(directory: Path) -> torch.nn.Module:
    """The model in float32."""
    named = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, named).from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None  # torch gives a padding id no gradient; here it is a token
    return model.eval()


def adapted(model: torch.nn.Module, file: Path) -> dict[str, torch.nn.Parameter]:
    """Puts an adapter into the model, which is frozen; the adapter's parameters under PEFT's names."""
    model.requires_grad_(False)
    tensors, ours = load_file(file), {}
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        path = module.removeprefix("base_model.model.")
        layer = LoRALinear(model.get_submodule(path), tensors[name], tensors[f"{module}.lora_B.weight"])
        setattr(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], layer)
        ours |= {name: layer.a, f"{module}.lora_B.weight": layer.b}
    return ours


def logps(model: torch.nn.Module, ids: list[int], first: int) -> torch.Tensor:
    """Log-probability of each token from position `first` on, given those before it."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    return torch.log_softmax(logits, dim=-1)[first - 1 : -1].gather(-1, torch.tensor(ids[first:])[:, None])[:, 0]


def sft_loss(model: torch.nn.Module, rows: list[list[int]]) -> torch.Tensor:
    """The mean over all tokens of the batch but the first of each row."""
    return -torch.cat([logps(model, row, 1) for row in rows]).mean()


def sides(model: torch.nn.Module, row: dict[str, list[int]]) -> torch.Tensor:
    """Log-probabilities of both completions, `[2]`."""
    prompt = row["prompt"]
    return torch.stack([logps(model, prompt + row[side], len(prompt)).sum() for side in ("chosen", "rejected")])


def dpo_loss(model: torch.nn.Module, rows: list[dict[str, list[int]]], reference: list[torch.Tensor]) -> torch.Tensor:
    """The mean over pairs."""
    ratios = torch.stack([sides(model, row) - ours for row, ours in zip(rows, reference, strict=True)])  # [B, 2]
    return -torch.nn.functional.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()


def main(directory: Path, rows: Path, out: Path, adapter: Path | None = None) -> None:
    """See the module's docstring."""
    model, steps = load(directory), json.loads(rows.read_text())
    is_dpo, reference = isinstance(steps[0][0], dict), []
    if is_dpo:
        with torch.no_grad():
            reference = [[sides(model, row) for row in batch] for batch in steps]
    named = adapted(model, adapter) if adapter else dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=LR, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.0)
    figures = []
    for number, batch in enumerate(steps):
        optimizer.zero_grad()
        loss = dpo_loss(model, batch, reference[number]) if is_dpo else sft_loss(model, batch)
        loss.backward()
        gradients = [p.grad for p in named.values() if p.grad is not None]
        norm = float(torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)))
        for gradient in gradients:
            gradient.mul_(min(1.0, CLIP / norm))
        optimizer.step()
        figures.append({"loss": float(loss), "grad_norm": norm})
    out.mkdir(parents=True, exist_ok=True)
    (out / "figures.json").write_text(json.dumps(figures))
    if adapter:
        save_file({name: p.detach().contiguous() for name, p in named.items()}, out / "adapter_model.safetensors")
    else:
        model.save_pretrained(out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
