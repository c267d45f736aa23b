"""Replays training with torch and transformers, from the published formulas alone, and stores the figures of each step.

Three commands, from the repository's root (figures stored here: torch 2.13, transformers 5.23):

    python tests/reference/make_replay.py inputs            # with torch: a small checkpoint, pairs and texts
    python tests/reference/make_replay_adapters.py          # with nnxdsl: the first values of LoRA's A
    python tests/reference/make_replay.py start             # with torch: an adapter to go on with, in PEFT's format
    python tests/reference/make_replay.py figures [RUN ...] # with torch: expected.json, of all runs or of some

Nothing of nnxdsl is imported here. The first values of A are drawn by jax's own generator, which torch has not, so
they are stored by the second command. Everything else is written down again: LoRA (Hu et al. 2021), rsLoRA
(Kalajdzievski 2023), DoRA (Liu et al. 2024, its norm a constant in gradients), DPO (Rafailov et
al. 2023, with the label smoothing of Mitchell 2023), cross entropy, AdamW (Loshchilov & Hutter 2019), SGD with
momentum, warm-up and cosine, and clipping by the global norm. Rows are computed one at a time, chosen and rejected
apart and without padding; weights and everything outside of transformers' norms and softmax are float64.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

HERE = Path(__file__).parent / "replay"
CONFIG = {
    "vocab_size": 320,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 5,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 64,
    "query_pre_attn_scalar": 12,
}
PAIRS = 26  # ten batches of four go over the end of the file
TEXTS = (
    "A pair is a prompt and two answers.",
    "Short.",
    "The loss is a mean over all target tokens, not of means.",
    "Bytes: \u00e9\u4e2d.",
    "One more line, neither long nor short",
    "x",
    "Seven texts for batches of four",
)
BATCH, STEPS = 4, 10
LORA = {
    "rank": 3,
    "alpha": 6.0,
    "targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
ADAMW = {"rule": "adamw", "peak": 4e-3, "warmup": 2, "final_ratio": 0.1, "decay": 0.1, "clip": 1.0}
SGD = {"rule": "sgd", "lr": 0.01, "momentum": 0.9, "clip": None}
DPO = {"beta": 0.1, "smoothing": 0.0}
RUNS = {
    "dpo-full-adamw": {"adapter": None, **DPO, **ADAMW},
    "dpo-full-sgd": {"adapter": None, **DPO, **SGD},
    "dpo-lora-adamw": {"adapter": "lora", **DPO, **ADAMW},
    "dpo-lora-sgd": {"adapter": "lora", **DPO, **SGD},
    "dpo-lora-smoothed": {"adapter": "lora", "beta": 0.25, "smoothing": 0.3, **ADAMW},
    "sft-full-adamw": {"adapter": None, "beta": None, **ADAMW},
    "dpo-rslora-adamw": {"adapter": "rslora", **DPO, **ADAMW},
    "dpo-dora-adamw": {"adapter": "dora", **DPO, **ADAMW},
    "dpo-dora-sgd": {"adapter": "dora", **DPO, **SGD},
    # An adapter that was trained before goes on; the reference is that adapter as it was.
    "dpo-continued-adamw": {"adapter": "continued", **DPO, **ADAMW},
}


def inputs() -> None:
    """A random checkpoint whose norms are not at zero, and the rows."""
    torch.manual_seed(7)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**CONFIG)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * spread)
    shutil.rmtree(HERE / "model", ignore_errors=True)
    model.save_pretrained(HERE / "model")
    (HERE / "model" / "generation_config.json").unlink(missing_ok=True)
    draw = np.random.default_rng(7)
    with (HERE / "pairs.jsonl").open("w") as file:
        for _ in range(PAIRS):
            lengths = {
                "prompt_ids": draw.integers(1, 14),
                "chosen_ids": draw.integers(1, 12),
                "rejected_ids": draw.integers(1, 12),
            }
            # Many tokens twice in a row: a random model with a tied head likes to repeat, so some are predicted right.
            row = {
                name: np.repeat(draw.integers(0, 320, size), draw.integers(1, 3, size))[:size]
                for name, size in lengths.items()
            }
            file.write(json.dumps({name: ids.tolist() for name, ids in row.items()}) + "\n")
    with (HERE / "texts.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)


def start() -> None:
    """A LoRA with a B that is not zero, as PEFT stores it."""
    torch.manual_seed(11)
    samples = np.load(HERE / "adapters.npz")
    model = Gemma3ForCausalLM.from_pretrained(HERE / "model")
    tensors = {}
    for name in sorted(samples):
        module = f"base_model.model.{name}"
        tensors[f"{module}.lora_A.weight"] = torch.tensor(samples[name].T).contiguous()
        outputs = model.get_submodule(name).out_features
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, LORA["rank"]) * 0.05
    (HERE / "adapter").mkdir(exist_ok=True)
    save_file(tensors, HERE / "adapter" / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": LORA["rank"], "lora_alpha": LORA["alpha"],
              "target_modules": list(LORA["targets"]), "bias": "none"}  # fmt: skip
    (HERE / "adapter" / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")


class LoRALinear(torch.nn.Module):
    """y = x W + scale x A B."""

    def __init__(self, inner: torch.nn.Linear, a: np.ndarray, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale
        self.a = torch.nn.Parameter(torch.tensor(a, dtype=torch.float64))  # [in, rank]
        self.b = torch.nn.Parameter(torch.zeros(a.shape[1], inner.out_features, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer with its adapter."""
        return self.inner(x) + self.scale * (x @ self.a @ self.b)


class DoRALinear(LoRALinear):
    """y = (m / |V|) x V of V = W + scale A B, with |V| a constant in gradients."""

    def __init__(self, inner: torch.nn.Linear, a: np.ndarray, scale: float) -> None:
        super().__init__(inner, a, scale)
        self.m = torch.nn.Parameter(inner.weight.detach().norm(dim=1))  # [out]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer with its adapter."""
        direction = self.inner.weight.T + self.scale * (self.a @ self.b)  # [in, out]
        return (x @ direction) * (self.m / direction.norm(dim=0).detach())


def load(adapter: str | None) -> tuple[torch.nn.Module, list[tuple[torch.nn.Parameter, bool]]]:
    """The model, and what is trained: each parameter with whether weight decay holds for it."""
    model = Gemma3ForCausalLM.from_pretrained(HERE / "model", attn_implementation="eager", dtype=torch.float64).eval()
    # torch gives a padding id no gradient, and transformers takes 0 for it; here 0 is a token like any other.
    model.model.embed_tokens.padding_idx = None
    if adapter is None:
        return model, [(parameter, parameter.ndim > 1) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    samples = np.load(HERE / "adapters.npz")
    begun = load_file(HERE / "adapter" / "adapter_model.safetensors") if adapter == "continued" else {}
    scale = LORA["alpha"] / (math.sqrt(LORA["rank"]) if adapter == "rslora" else LORA["rank"])
    trained = []
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in LORA["targets"]:
            parent = model.get_submodule(name.rpartition(".")[0])
            layer = (DoRALinear if adapter == "dora" else LoRALinear)(module, samples[name], scale)
            if begun:
                with torch.no_grad():
                    layer.b.copy_(begun[f"base_model.model.{name}.lora_B.weight"].T)
            setattr(parent, name.rpartition(".")[2], layer)
            trained += [(layer.a, True), (layer.b, True)]
            if adapter == "dora":
                trained.append((layer.m, False))
    return model, trained


def targets(model: torch.nn.Module, ids: list[int], first: int) -> dict[str, torch.Tensor]:
    """Log-probability, entropy and correctness of the tokens from position `first` on, each given those before it."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    log_p = torch.log_softmax(logits, dim=-1)[first - 1 : -1]
    wanted = torch.tensor(ids[first:])
    return {
        "logp": log_p[torch.arange(len(wanted)), wanted],
        "entropy": -(log_p.exp() * log_p).sum(-1).detach(),
        "correct": (log_p.argmax(-1) == wanted).double(),
    }


def dpo_step(
    run: dict, model: torch.nn.Module, reference: torch.nn.Module, rows: list[dict]
) -> dict[str, torch.Tensor]:
    """Means over pairs, and means over all completion tokens."""
    beta, smoothing = run["beta"], run["smoothing"]
    losses, chosen_rewards, rejected_rewards, logps, tokens = [], [], [], {"chosen": [], "rejected": []}, []
    for row in rows:
        ratios = {}
        for side in ("chosen", "rejected"):
            ids = row["prompt_ids"] + row[f"{side}_ids"]
            policy = targets(model, ids, len(row["prompt_ids"]))
            with torch.no_grad():
                compared = targets(reference, ids, len(row["prompt_ids"]))
            ratios[side] = policy["logp"].sum() - compared["logp"].sum()
            logps[side].append(policy["logp"].sum().detach())
            tokens.append(policy)
        difference = ratios["chosen"] - ratios["rejected"]
        log_sigmoid = torch.nn.functional.logsigmoid
        losses.append(-(1 - smoothing) * log_sigmoid(beta * difference) - smoothing * log_sigmoid(-beta * difference))
        chosen_rewards.append(beta * ratios["chosen"].detach())
        rejected_rewards.append(beta * ratios["rejected"].detach())
    chosen, rejected = torch.stack(chosen_rewards), torch.stack(rejected_rewards)
    return {
        "loss": torch.stack(losses).mean(),
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).double().mean(),
        "logps/chosen": torch.stack(logps["chosen"]).mean(),
        "logps/rejected": torch.stack(logps["rejected"]).mean(),
        "entropy": torch.cat([t["entropy"] for t in tokens]).mean(),
        "mean_token_accuracy": torch.cat([t["correct"] for t in tokens]).mean(),
    }


def sft_step(model: torch.nn.Module, rows: list[dict]) -> dict[str, torch.Tensor]:
    """The mean over all target tokens of the batch; a text is BOS (257), its bytes, and EOS (258)."""
    tokens = [targets(model, [257, *row["text"].encode(), 258], 1) for row in rows]
    return {
        "loss": -torch.cat([t["logp"] for t in tokens]).mean(),
        "entropy": torch.cat([t["entropy"] for t in tokens]).mean(),
        "mean_token_accuracy": torch.cat([t["correct"] for t in tokens]).mean(),
    }


def learning_rate(run: dict, step: int) -> float:
    """Constant; or from zero up to the peak, then half a cosine down to a part of it at step `STEPS`."""
    if run["rule"] == "sgd":
        return run["lr"]
    if step < run["warmup"]:
        return run["peak"] * step / run["warmup"]
    cosine = 0.5 * (1 + math.cos(math.pi * (step - run["warmup"]) / (STEPS - run["warmup"])))
    return run["peak"] * ((1 - run["final_ratio"]) * cosine + run["final_ratio"])


def replay(run: dict) -> list[dict[str, float]]:
    """The figures of every step."""
    model, trained = load(run["adapter"])
    reference, _ = load(run["adapter"])  # as the policy begins, and it stays so
    name = "texts" if run["beta"] is None else "pairs"
    rows = [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]
    first = [torch.zeros_like(p) for p, _ in trained]
    second = [torch.zeros_like(p) for p, _ in trained]
    figures = []
    for step in range(STEPS):
        batch = [rows[i % len(rows)] for i in range(step * BATCH, (step + 1) * BATCH)]
        result = sft_step(model, batch) if run["beta"] is None else dpo_step(run, model, reference, batch)
        gradients = torch.autograd.grad(result["loss"], [p for p, _ in trained])
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))
        rate = learning_rate(run, step)
        figures.append({**{k: v.item() for k, v in result.items()}, "grad_norm": norm.item(), "learning_rate": rate})
        scale = 1.0 if run["clip"] is None else min(1.0, run["clip"] / norm.item())
        with torch.no_grad():
            for (parameter, decays), gradient, m, v in zip(trained, gradients, first, second, strict=True):
                g = gradient * scale
                if run["rule"] == "sgd":
                    m.mul_(run["momentum"]).add_(g)
                    parameter -= rate * m
                    continue
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).add_(g**2, alpha=0.001)
                m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                parameter -= rate * (m_hat / (v_hat.sqrt() + 1e-8) + (run["decay"] if decays else 0.0) * parameter)
    return figures


def figures(names: list[str]) -> None:
    """All runs, or those that are named, as JSON with ten significant digits."""
    stored = json.loads((HERE / "expected.json").read_text()) if names else {}
    for name, run in RUNS.items():
        if name in names or not names:
            stored[name] = [{key: float(f"{value:.10g}") for key, value in row.items()} for row in replay(run)]
    text = ",\n".join(f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in stored.items())
    (HERE / "expected.json").write_text("{\n" + text + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1] == "figures":
        figures(sys.argv[2:])
    else:
        {"inputs": inputs, "start": start}[sys.argv[1]]()
