"""Replays training with MuonClip in torch and transformers, from the published formulas, and stores the figures.

    python tests/reference/make_qk_clip.py      # from the repository's root (stored: torch 2.13, transformers 5.23)

Nothing of nnxdsl is imported here. Muon is Jordan's (Newton-Schulz with his coefficients, Nesterov's momentum) with the
scale of Liu et al. 2025, arXiv:2502.16982, AdamW for the rest, then QK-clip of Kimi K2, arXiv:2507.20534, algorithm 1;
query heads that share a key head take the whole factor, as the report's rotary queries do, whose key is shared. Scores
are those of the queries and keys that transformers hands to its attention function. Rows are computed one at a time
without padding, and everything is float64.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2Config

REFERENCE = Path(__file__).parent
HERE = REFERENCE / "qk_clip"
MHA = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}
RUNS = {
    # The model, and a part of the names of the parameters that are trained.
    "mha": {"model": "qk_clip/mha", "trained": ""},
    "gqa": {"model": "families/qwen2", "trained": ""},
    "mla": {"model": "families/deepseek_v3", "trained": "self_attn"},
    "mla-full-queries": {"model": "families/deepseek_v3_plain", "trained": "self_attn"},
}
ROWS, LENGTH, STEPS = 4, 12, 4
RATE, DECAY, CLIP, EPS, MOMENTUM, B1, B2, RMS = 0.02, 0.1, 1.0, 1e-4, 0.95, 0.9, 0.95, 0.2

scores: dict[int, torch.Tensor] = {}
"""The largest score of each head `[N]` by layer, over all rows of a step so far."""


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **fields: object
) -> tuple[torch.Tensor, None]:
    """Causal attention of one row `[1, N, T, H]`, which notes the largest score of each head."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    result = query @ key.mT * fields["scaling"]
    length = query.shape[2]
    result = result.masked_fill(~torch.tril(torch.ones(length, length, dtype=torch.bool)), -math.inf)
    largest = result.detach().amax(dim=(0, 2, 3))
    before = scores.get(module.layer_idx)
    scores[module.layer_idx] = largest if before is None else torch.maximum(before, largest)
    return (result.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("noted", attention)


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps of the quintic, from g over its Frobenius norm."""
    x = g / g.norm()
    x = x.T if (tall := g.shape[0] > g.shape[1]) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Rule:
    """The update of one parameter: Muon's of a linear layer's matrix, else AdamW's; a vector is not decayed."""

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        self.m, self.v = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def move(self, g: torch.Tensor, step: int) -> None:
        """One step, counted from 1."""
        if self.is_matrix:
            self.m = MOMENTUM * self.m + (1 - MOMENTUM) * g
            ahead = MOMENTUM * self.m / (1 - MOMENTUM ** (step + 1)) + (1 - MOMENTUM) * g / (1 - MOMENTUM**step)
            direction = RMS * math.sqrt(max(g.shape)) * orthogonal(ahead)
        else:
            self.m, self.v = B1 * self.m + (1 - B1) * g, B2 * self.v + (1 - B2) * g**2
            direction = (self.m / (1 - B1**step)) / ((self.v / (1 - B2**step)).sqrt() + EPS)
        self.parameter -= RATE * (direction + DECAY * (self.parameter.ndim > 1) * self.parameter)


def clip(layer: torch.nn.Module, config: object, tau: float, largest: torch.Tensor) -> int:
    """QK-clip of one layer's attention; the number of heads above tau."""
    heads, ours = config.num_attention_heads, layer.self_attn
    for head in range(heads):
        if largest[head] <= tau:
            continue
        gamma = float(tau / largest[head])
        if hasattr(ours, "kv_b_proj"):
            nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
            queries = ours.q_b_proj if config.q_lora_rank else ours.q_proj
            start = head * (nope + rope)
            queries.weight[start : start + nope] *= gamma**0.5
            queries.weight[start + nope : start + nope + rope] *= gamma
            start = head * (nope + config.v_head_dim)
            ours.kv_b_proj.weight[start : start + nope] *= gamma**0.5
            continue
        width = ours.head_dim
        rows = slice(head * width, (head + 1) * width)
        is_shared = config.num_key_value_heads < heads
        for linear, power in ((ours.q_proj, 1.0 if is_shared else 0.5), (ours.k_proj, 0.0 if is_shared else 0.5)):
            if power:
                linear.weight[rows] *= gamma**power
                linear.bias[rows] *= gamma**power
    return int((largest > tau).sum())


def replay(run: dict, tau: float | None, batches: list[dict]) -> list[dict[str, float]]:
    """The figures of every step; without QK-clip where tau is None."""
    model = AutoModelForCausalLM.from_pretrained(
        REFERENCE / run["model"], attn_implementation="noted", experts_implementation="eager", dtype=torch.float64
    ).eval()
    model.get_input_embeddings().padding_idx = None
    rules = [Rule(name, p) for name, p in model.named_parameters() if run["trained"] in name and p.requires_grad]
    result = []
    for step, batch in enumerate(batches):
        scores.clear()
        total, count = torch.zeros(()), 0
        for ids, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
            wanted = torch.tensor([place for place, is_target in enumerate(mask) if is_target])
            log_p = torch.log_softmax(logits, dim=-1)[wanted - 1]
            total = total - log_p[torch.arange(len(wanted)), torch.tensor(ids)[wanted]].sum()
            count += len(wanted)
        loss = total / count
        grads = torch.autograd.grad(loss, [rule.parameter for rule in rules])
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        clipped = 0
        with torch.no_grad():
            for rule, g in zip(rules, grads, strict=True):
                rule.move(g * min(1.0, CLIP / float(norm)), step + 1)
            for number, layer in enumerate(model.model.layers):
                if tau is not None:
                    clipped += clip(layer, model.config, tau, scores[number])
        largest = {str(layer): row.tolist() for layer, row in sorted(scores.items())}
        figures = {"loss": float(loss.detach()), "grad_norm": float(norm), "qk_clipped_heads": clipped}
        figures["max_attention_logit"] = max(max(row) for row in largest.values())
        result.append({**figures, "heads": largest})
    return result


def batches_of(vocab: int) -> list[dict]:
    """Rows of unequal lengths, about half of whose tokens are targets."""
    draw = np.random.default_rng(5)
    result = []
    for _ in range(STEPS):
        lengths = draw.integers(3, LENGTH + 1, ROWS)
        tokens = [draw.integers(1, vocab, length).tolist() for length in lengths]
        masks = [[False, True, *(draw.random(length - 2) < 0.5).tolist()] for length in lengths]
        result.append({"tokens": tokens, "loss_mask": masks})
    return result


def main() -> None:
    """A checkpoint whose keys no heads share, and the figures of all runs."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**MHA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or "bias" in name:
                parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(HERE / "mha")
    (HERE / "mha" / "generation_config.json").unlink(missing_ok=True)
    stored = {}
    for name, run in RUNS.items():
        vocab = json.loads((REFERENCE / run["model"] / "config.json").read_text())["vocab_size"]
        batches = batches_of(vocab)
        free = replay(run, None, batches)
        tau = round(float(np.median([score for row in free[0]["heads"].values() for score in row])), 3)
        clipped = replay(run, tau, batches)
        assert all(row["qk_clipped_heads"] for row in clipped), clipped
        assert max(row["max_attention_logit"] for row in free[1:]) > 1.05 * clipped[-1]["max_attention_logit"]
        stored[name] = {"model": run["model"], "max_attention_logit": tau, "batches": batches, "steps": clipped}
        print(name, tau, [(row["max_attention_logit"], row["qk_clipped_heads"]) for row in clipped])
    (HERE / "expected.json").write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
