"""Replays ten steps of training with every objective of pairs and of answers, in float64; stores the figures of each.

One command, from the repository's root, after those of `make_replay.py`, whose model, rows, LoRA and AdamW it has:

    python tests/reference/make_replay_objectives.py    # with torch (stored here: torch 2.15, transformers 5.12)

Nothing of nnxdsl is imported here. Log-probabilities are of single rows, chosen and rejected apart and without padding.
All of it is float64: where transformers takes float32 whatever the weights are, for norms, angles and softmax, it is
given float64 here.
Losses are those of `make_objectives.py`, which TRL's agree with, and KTO's own, written once more.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from make_objectives import CASES, per_pair, rewards
from make_replay import ADAMW, BATCH, HERE, STEPS, learning_rate, load, targets

_softmax = torch.nn.functional.softmax
torch.nn.functional.softmax = lambda x, dim, dtype=None: _softmax(x, dim=dim)  # of whatever dtype `x` has
torch.Tensor.float = torch.Tensor.double

SYNCED = {"every_steps": 3, "ref_model_mixup_alpha": 0.4}
RUNS: dict[str, dict[str, Any]] = {
    **{
        name: {"objective": CASES[name]}
        for name in (
            *("dpo smoothed", "dpo forward", "dpo js", "dpo alpha", "robust", "ipo", "hinge", "length normalized"),
            *(
                "exo",
                "discopop",
                "nca",
                "bco",
                "bco shifted",
                "sppo stronger",
                "apo zero",
                "apo down",
                "aot",
                "aot unpaired",
            ),
            *("orpo", "simpo", "cpo", "chosen", "rpo", "mpo"),
        )
    },
    "kto": {"objective": {"type": "KTO", "beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}},
    "dpo tails": {"objective": {**CASES["dpo"], "beta": 0.3, "ld_alpha": 0.25}},
    "exo tails": {"objective": {**CASES["exo"], "ld_alpha": 0.0}},
    "dpo weighted": {"objective": {**CASES["dpo"], "beta": 0.3, "weighting": "wpo"}},
    "dpo synced": {"objective": {**CASES["dpo"], "beta": 0.3}, "synced": SYNCED},
    "dpo uniform": {"objective": {**CASES["dpo"], "beta": 0.05}, "uniform": True},
}


def exact() -> tuple[torch.nn.Module, list[tuple[torch.nn.Parameter, bool]]]:
    """The model with a new LoRA, and its constants in float64, which transformers rounds to float32."""
    model, trained = load("lora")
    config, rotation = model.config, model.model.rotary_emb
    for kind, parameters in config.rope_parameters.items():
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        setattr(rotation, f"{kind}_inv_freq", parameters["rope_theta"] ** -exponent)
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=torch.float64)
    return model, trained


def said(
    model: torch.nn.Module, prompt: list[int], completion: list[int], whole: int | None = None, tail: float = 1.0
) -> torch.Tensor:
    """The summed log-probability of a completion, whose tokens after the first `whole` count `tail` each."""
    logp = targets(model, prompt + completion, len(prompt))["logp"]
    return logp.sum() if whole is None else logp[:whole].sum() + tail * logp[whole:].sum()


def likelihood(model: torch.nn.Module, row: dict) -> torch.Tensor:
    """The weight of a pair (Zhou et al. 2024, equation 2): exp of both completions' mean of log p - log sum p^2."""
    means = []
    for side in ("chosen_ids", "rejected_ids"):
        ids, first = row["prompt_ids"] + row[side], len(row["prompt_ids"])
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()[first - 1 : -1]
        log_p = torch.log_softmax(logits, dim=-1)
        ours = log_p[torch.arange(len(row[side])), torch.tensor(row[side])]
        means.append((ours - torch.logsumexp(2 * log_p, dim=-1)).mean())
    return torch.exp(means[0] + means[1])


def pairs_step(run: dict[str, Any], model: torch.nn.Module, reference: torch.nn.Module, rows: list[dict]) -> Any:
    """Loss and metrics of a batch of pairs."""
    sides, tail = ("chosen", "rejected"), run["objective"].get("ld_alpha", 1.0)

    def ask(asked: torch.nn.Module, side: str) -> torch.Tensor:
        shorter = [min(len(row[f"{s}_ids"]) for s in sides) for row in rows]
        actual = [
            said(asked, row["prompt_ids"], row[f"{side}_ids"], n, tail) for row, n in zip(rows, shorter, strict=True)
        ]
        return torch.stack(actual)

    result = {side: ask(model, side) for side in sides}
    with torch.no_grad():
        result |= {f"reference_{side}": ask(reference, side) * (0 if run.get("uniform") else 1) for side in sides}
    for side in sides:
        result[f"{side}_tokens"] = torch.tensor([float(len(row[f"{side}_ids"])) for row in rows], dtype=torch.float64)
    each = per_pair(run["objective"], result)
    if run["objective"].get("weighting") == "wpo":
        with torch.no_grad():
            weights = torch.stack([likelihood(model, row) for row in rows])
        each = each * weights
    metrics = {"loss": each.mean()}
    metrics |= {f"logps/{side}": result[side].mean() for side in sides}
    earned = rewards(run["objective"], result)
    if earned is not None:
        chosen, rejected = earned
        metrics |= {"rewards/chosen": chosen.mean(), "rewards/rejected": rejected.mean()}
        metrics |= {"rewards/margins": (chosen - rejected).mean()}
    return metrics


def answers_of(rows: list[dict]) -> list[dict]:
    """Each pair as two answers, with the nearest answer before it that has the same label and another prompt."""
    answers = [
        {"prompt": row["prompt_ids"], "own": row[f"{side}_ids"], "liked": side == "chosen"}
        for row in rows
        for side in ("chosen", "rejected")
    ]
    for place, answer in enumerate(answers):
        before = (answers[place - back] for back in range(1, len(answers)))
        other = next(o for o in before if o["liked"] == answer["liked"] and o["prompt"] != answer["prompt"])
        answer["other"] = other["own"]
    return answers


def kto_step(run: dict[str, Any], model: torch.nn.Module, reference: torch.nn.Module, rows: list[dict]) -> Any:
    """Loss and metrics of a batch of answers (Ethayarajh et al. 2024, equation 7)."""
    asked = run["objective"]
    beta = asked["beta"]
    with torch.no_grad():
        far = [said(model, a["prompt"], a["other"]) - said(reference, a["prompt"], a["other"]) for a in rows]
        kl = torch.stack(far).mean().clamp(min=0)
        known = torch.stack([said(reference, a["prompt"], a["own"]) for a in rows])
    logps = torch.stack([said(model, a["prompt"], a["own"]) for a in rows])
    ratio, liked = logps - known, torch.tensor([a["liked"] for a in rows])
    gain = asked["desirable_weight"] * (1 - torch.sigmoid(beta * (ratio - kl)))
    pain = asked["undesirable_weight"] * (1 - torch.sigmoid(beta * (kl - ratio)))
    chosen, rejected = beta * ratio[liked].mean(), beta * ratio[~liked].mean()
    return {
        "loss": torch.where(liked, gain, pain).mean(),
        "kl": kl,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps[liked].mean(),
        "logps/rejected": logps[~liked].mean(),
    }


def replay(run: dict[str, Any]) -> list[dict[str, float]]:
    """The figures of every step."""
    model, trained = exact()
    reference, followed = exact()
    rows = [json.loads(line) for line in (HERE / "pairs.jsonl").read_text().splitlines()]
    is_kto = run["objective"]["type"] == "KTO"
    rows = answers_of(rows) if is_kto else rows
    first, second = ([torch.zeros_like(p) for p, _ in trained] for _ in range(2))
    figures = []
    for step in range(STEPS):
        batch = [rows[i % len(rows)] for i in range(step * BATCH, (step + 1) * BATCH)]
        result = (kto_step if is_kto else pairs_step)(run, model, reference, batch)
        gradients = torch.autograd.grad(result["loss"], [p for p, _ in trained])
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))
        figures.append({**{k: v.item() for k, v in result.items()}, "grad_norm": norm.item()})
        rate, scale = learning_rate(ADAMW, step), min(1.0, ADAMW["clip"] / norm.item())
        with torch.no_grad():
            for (parameter, _), gradient, m, v in zip(trained, gradients, first, second, strict=True):
                m.mul_(0.9).add_(gradient * scale, alpha=0.1)
                v.mul_(0.999).add_((gradient * scale) ** 2, alpha=0.001)
                m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                parameter -= rate * (m_hat / (v_hat.sqrt() + 1e-8) + ADAMW["decay"] * parameter)
            synced = run.get("synced")
            if synced and (step + 1) % synced["every_steps"] == 0:
                for (parameter, _), (leaf, _) in zip(trained, followed, strict=True):
                    leaf.copy_(
                        synced["ref_model_mixup_alpha"] * parameter + (1 - synced["ref_model_mixup_alpha"]) * leaf
                    )
    return figures


def main(names: list[str]) -> None:
    """All runs, or those that are named, as JSON with ten significant digits."""
    torch.set_num_threads(1)  # quicker for so small a model
    file = HERE / "objectives.json"
    stored = json.loads(file.read_text()) if names else {}
    for name, run in RUNS.items():
        if not names or name in names:
            steps = [{key: float(f"{value:.10g}") for key, value in row.items()} for row in replay(run)]
            stored[name] = {**run, "steps": steps}
            print(name, steps[0]["loss"], steps[-1]["loss"], flush=True)
            text = ",\n".join(f'"{name}": {json.dumps(case)}' for name, case in stored.items())
            file.write_text("{\n" + text + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
