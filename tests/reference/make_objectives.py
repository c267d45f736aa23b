"""The losses of preference pairs in float64, written down from the papers, with gradients by torch; stored as figures.

One command, from the repository's root (figures stored here: torch 2.15, TRL 1.16):

    python tests/reference/make_objectives.py           # with torch, and TRL as a second opinion where it is installed

Nothing of nnxdsl is imported here. Pairs are a few that were drawn and a few that are extreme; their numbers are those
that float32 has. Every formula is of plain tensors of log-probabilities, one for each pair, as the papers write it.
TRL's own functions must agree with these wherever both define the same loss: within 1e-7, or 1e-5 where TRL computes in
float32. They differ on purpose in one thing: the likelihood of chosen completions is here a mean over pairs, each of
its own tokens (the papers' expectation), in TRL a mean over all tokens of a batch, and for ORPO and CPO those of
prompts too; so that term is compared on pairs of one length, and without prompts.
"""

from __future__ import annotations

import collections
import json
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    from trl import DPOTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer
except ImportError:
    DPOTrainer = CPOTrainer = ORPOTrainer = None

HERE = Path(__file__).parent / "objectives"
Pairs = dict[str, torch.Tensor]
KL = {"type": "ReverseKL"}
FORWARD, JS, ALPHA = {"type": "ForwardKL"}, {"type": "JensenShannon"}, {"type": "Alpha", "alpha": 0.3}
SMOOTH = {"beta": 0.25, "label_smoothing": 0.3}
DPO = {"type": "DPO", "beta": 0.1, "label_smoothing": 0.0, "divergence": KL}
BCO, CHOSEN = {"type": "BCO", "beta": 0.2}, {"type": "ChosenSFT"}
CASES: dict[str, dict[str, Any]] = {
    "dpo": DPO,
    "dpo smoothed": {**DPO, **SMOOTH},
    "dpo forward": {**DPO, "divergence": FORWARD},
    "dpo js": {**DPO, "divergence": JS, "beta": 0.7},
    "dpo alpha": {**DPO, "divergence": ALPHA},
    "robust": {"type": "RobustDPO", "beta": 0.2, "label_smoothing": 0.15, "divergence": KL},
    "robust js": {"type": "RobustDPO", "beta": 0.2, "label_smoothing": 0.15, "divergence": JS},
    "ipo": {"type": "IPO", "tau": 0.1, "divergence": KL},
    "ipo forward": {"type": "IPO", "tau": 0.3, "divergence": FORWARD},
    "ipo alpha": {"type": "IPO", "tau": 0.3, "divergence": ALPHA},
    "hinge": {"type": "Hinge", "beta": 0.3, "divergence": KL},
    "hinge js": {"type": "Hinge", "beta": 0.3, "divergence": JS},
    "length normalized": {"type": "LengthNormalizedDPO", "beta": 5.0, "divergence": KL},
    "length normalized js": {"type": "LengthNormalizedDPO", "beta": 2.0, "divergence": JS},
    "exo": {"type": "EXO", "beta": 0.1, "label_smoothing": 1e-3, "divergence": KL},
    "exo alpha": {"type": "EXO", "beta": 0.1, "label_smoothing": 0.1, "divergence": ALPHA},
    "discopop": {"type": "DiscoPOP", "beta": 0.05, "tau": 0.05, "divergence": KL},
    "discopop js": {"type": "DiscoPOP", "beta": 0.1, "tau": 0.3, "divergence": JS},
    "nca": {"type": "NCA", "beta": 0.1},
    "bco": BCO,
    "bco shifted": {**BCO, "shift": "batch"},
    "sppo": {"type": "SPPO", "beta": 1e-3},
    "sppo stronger": {"type": "SPPO", "beta": 0.05},
    "apo zero": {"type": "APOZero", "beta": 0.1},
    "apo down": {"type": "APODown", "beta": 0.1},
    "aot": {"type": "AOT", **SMOOTH},
    "aot unpaired": {"type": "AOTUnpaired", **SMOOTH},
    "orpo": {"type": "ORPO", "beta": 0.1},
    "orpo stronger": {"type": "ORPO", "beta": 2.0},
    "simpo": {"type": "SimPO", "beta": 2.0, "gamma": 1.0},
    "simpo no margin": {"type": "SimPO", "beta": 2.5, "gamma": 0.0},
    "cpo": {"type": "CPO", "beta": 0.1, "alpha": 0.7},
    "cpo alone": {"type": "CPO", "beta": 0.1, "alpha": 0.0},
    "chosen": CHOSEN,
    "rpo": {"type": "Sum", "terms": [DPO, CHOSEN], "weights": [1.0, 0.2]},
    "mpo": {"type": "Sum", "terms": [DPO, {**BCO, "beta": 0.1}, CHOSEN], "weights": [0.8, 0.2, 1.0]},
    "aot and bco": {"type": "Sum", "terms": [{"type": "AOT", **SMOOTH}, BCO], "weights": [0.5, 3.0]},
}
WHOLE = ("AOT", "AOTUnpaired", "batch")
"""What has no loss of one pair."""


def random_logps() -> dict[str, list[float]]:
    """Twelve pairs; the first eight are of an ordinary size."""
    draw = np.random.default_rng(11)
    chosen_tokens, rejected_tokens = draw.integers(3, 300, (2, 12))
    reference_chosen = -chosen_tokens * draw.uniform(0.2, 2.5, 12)
    reference_rejected = -rejected_tokens * draw.uniform(0.2, 2.5, 12)
    chosen, rejected = reference_chosen + draw.normal(1, 4, 12), reference_rejected + draw.normal(-1, 4, 12)
    # The same under both; far above; far below; and completions that are nearly certain, of one token.
    chosen[8], rejected[8] = reference_chosen[8], reference_rejected[8]
    chosen[9], rejected[9] = reference_chosen[9] + 24, reference_rejected[9] - 19
    chosen[10], rejected[10] = reference_chosen[10] - 17, reference_rejected[10] + 21
    chosen_tokens[11], rejected_tokens[11] = 1, 2
    chosen[11], rejected[11], reference_chosen[11], reference_rejected[11] = -3e-6, -0.01, -0.5, -0.02
    result = {
        "chosen": chosen,
        "rejected": rejected,
        "chosen_tokens": chosen_tokens,
        "rejected_tokens": rejected_tokens,
        "reference_chosen": reference_chosen,
        "reference_rejected": reference_rejected,
    }
    return {name: values.astype(np.float32).astype(float).tolist() for name, values in result.items()}


# -- the formulas ----------------------------------------------------------------------------------------------------


def s(z: torch.Tensor) -> torch.Tensor:
    """log sigmoid."""
    return torch.nn.functional.logsigmoid(z)


def sigmoid(z: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-z))."""
    return torch.sigmoid(z)


def score(divergence: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """f'(u) of u = exp(x), shifted to 0 at u = 1 (Wang et al. 2023, table 1)."""
    u = torch.exp(x)
    alpha = divergence.get("alpha", math.nan)
    return {
        "ReverseKL": lambda: torch.log(u),
        "ForwardKL": lambda: 1 - 1 / u,
        "JensenShannon": lambda: torch.log(2 * u / (1 + u)),
        "Alpha": lambda: (1 - u**-alpha) / alpha,
    }[divergence["type"]]()


def per_pair(objective: dict[str, Any], pairs: Pairs) -> torch.Tensor:
    """The loss of each pair; of AOT, of each place in the order."""
    p, q = pairs["chosen"], pairs["rejected"]
    c, r = p - pairs["reference_chosen"], q - pairs["reference_rejected"]
    n, m = pairs["chosen_tokens"], pairs["rejected_tokens"]
    a, b = p / n, q / m
    kind, beta, e = objective["type"], objective.get("beta", math.nan), objective.get("label_smoothing", math.nan)
    tau, t = objective.get("tau", math.nan), objective.get("divergence", KL)
    u, v = score(t, c), score(t, r)
    z = beta * (u - v)
    g, h = sigmoid(z), sigmoid(z / tau)
    odds = torch.exp(a) / (1 - torch.exp(a)), torch.exp(b) / (1 - torch.exp(b))
    paired = torch.sort(p - q).values - torch.sort(pairs["reference_chosen"] - pairs["reference_rejected"]).values
    # Half of the sum of both kinds' mean rewards, a constant (Jung et al. 2024).
    shift = (beta * (c.mean() + r.mean()) / 2).detach() if objective.get("shift") == "batch" else 0.0
    unpaired = torch.sort(c).values - torch.sort(r).values
    if kind == "Sum":
        terms = zip(objective["weights"], objective["terms"], strict=True)
        return sum(weight * per_pair(term, pairs) for weight, term in terms)
    return {
        "DPO": lambda: -(1 - e) * s(z) - e * s(-z),
        "RobustDPO": lambda: (-(1 - e) * s(z) + e * s(-z)) / (1 - 2 * e),
        "IPO": lambda: (u / n - v / m - 1 / (2 * tau)) ** 2,
        "Hinge": lambda: torch.clamp(1 - z, min=0),
        "LengthNormalizedDPO": lambda: -s(beta * (u / n - v / m)),
        "EXO": lambda: g * (s(z) - math.log(1 - e)) + (1 - g) * (s(-z) - math.log(e)),
        "DiscoPOP": lambda: -(1 - h) * s(z) + h * torch.exp(-z),
        "NCA": lambda: -s(beta * c) - s(-beta * c) / 2 - s(-beta * r) / 2,
        "BCO": lambda: -s(beta * c - shift) - s(shift - beta * r),
        "SPPO": lambda: (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
        "APOZero": lambda: 1 - sigmoid(beta * c) + sigmoid(beta * r),
        "APODown": lambda: sigmoid(beta * c) + 1 - sigmoid(beta * (c - r)),
        "AOT": lambda: -(1 - e) * s(beta * paired) - e * s(-beta * paired),
        "AOTUnpaired": lambda: -(1 - e) * s(beta * unpaired) - e * s(-beta * unpaired),
        "ORPO": lambda: -a - beta * s(torch.log(odds[0] / odds[1])),
        "SimPO": lambda: -s(beta * a - beta * b - objective["gamma"]),
        "CPO": lambda: -s(beta * p - beta * q) - objective["alpha"] * a,
        "ChosenSFT": lambda: -a,
    }[kind]()


def rewards(objective: dict[str, Any], pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Those of both completions, as TRL defines them; None for a likelihood alone."""
    if objective["type"] == "Sum":
        return next(filter(None, (rewards(term, pairs) for term in objective["terms"])))
    if objective["type"] == "ChosenSFT":
        return None
    beta = objective.get("beta", objective.get("tau"))
    p, q = pairs["chosen"], pairs["rejected"]
    if objective["type"] in ("ORPO", "SimPO"):
        return beta * p / pairs["chosen_tokens"], beta * q / pairs["rejected_tokens"]
    if objective["type"] == "CPO":
        return beta * p, beta * q
    return beta * (p - pairs["reference_chosen"]), beta * (q - pairs["reference_rejected"])


def figures(objective: dict[str, Any], values: dict[str, list[float]]) -> dict[str, Any]:
    """Loss, its gradient by the policy's log-probabilities, the loss of each pair, and means of rewards."""
    pairs = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    policy = [pairs[name].requires_grad_(True) for name in ("chosen", "rejected")]
    each = per_pair(objective, pairs)
    by_chosen, by_rejected = torch.autograd.grad(each.mean(), policy, allow_unused=True, materialize_grads=True)
    assert torch.isfinite(torch.stack([each, by_chosen, by_rejected])).all()
    result: dict[str, Any] = {"loss": each.mean(), "by_chosen": by_chosen, "by_rejected": by_rejected}
    whole = [{term["type"], term.get("shift")} & set(WHOLE) for term in objective.get("terms", [objective])]
    if not any(whole):
        result["pairs"] = each
    earned = rewards(objective, pairs)
    if earned is not None:
        chosen, rejected = earned
        result |= {"rewards/chosen": chosen.mean(), "rewards/rejected": rejected.mean()}
        result |= {"rewards/margins": (chosen - rejected).mean()}
        result |= {"rewards/accuracies": (chosen > rejected).double().mean()}
    return {name: value.detach().tolist() for name, value in result.items()}


# -- TRL's opinion ---------------------------------------------------------------------------------------------------

IN_TRL = {
    "DPO": "sigmoid",
    "RobustDPO": "robust",
    "IPO": "ipo",
    "Hinge": "hinge",
    "LengthNormalizedDPO": "sigmoid_norm",
    "EXO": "exo_pair",
    "DiscoPOP": "discopop",
    "NCA": "nca_pair",
    "BCO": "bco_pair",
    "SPPO": "sppo_hard",
    "APOZero": "apo_zero",
    "APODown": "apo_down",
    "AOT": "aot",
    "AOTUnpaired": "aot_unpaired",
    "ChosenSFT": "sft",
}
DIVERGENCES = {
    "ReverseKL": "reverse_kl",
    "ForwardKL": "forward_kl",
    "JensenShannon": "js_divergence",
    "Alpha": "alpha_divergence",
}


def dpo_trainer(objective: dict[str, Any], values: dict[str, list[float]]) -> dict[str, float]:
    """What the loss of TRL's DPOTrainer says of a model that gives these log-probabilities."""
    dtype = torch.float32 if "Alpha" in json.dumps(objective) else torch.float64  # there it knows no float64
    pairs = {name: torch.tensor(column, dtype=dtype) for name, column in values.items()}
    tokens = torch.cat([pairs["chosen_tokens"], pairs["rejected_tokens"]]).long()
    mask = (torch.arange(int(tokens.max()) + 1)[None, :] <= tokens[:, None]).long()
    mask[:, 0] = 0  # one token of a prompt
    # All of a sum in its first token: the sum is exact then.
    log_probs = torch.zeros(len(tokens), int(tokens.max()), dtype=dtype)
    log_probs[:, 0] = torch.cat([pairs["chosen"], pairs["rejected"]])
    nothing = torch.zeros_like(log_probs)
    said = types.SimpleNamespace(
        log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), log_sum_sq_probs=nothing
    )
    terms = objective.get("terms", [objective])
    first = terms[0]
    divergence = first.get("divergence", KL)
    stand_in = types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        args=types.SimpleNamespace(discopop_tau=first.get("tau"), gradient_checkpointing_kwargs=None),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type=DIVERGENCES[divergence["type"]],
        f_alpha_divergence_coef=1 - divergence.get("alpha", 0.5),
        loss_types=[IN_TRL[term["type"]] for term in terms],
        loss_weights=objective.get("weights", [1.0]),
        beta=first.get("beta", first.get("tau", 1.0)),
        label_smoothing=first.get("label_smoothing", 0.0),
        use_weighting=False,
    )
    if first["type"] == "DPO" and first["label_smoothing"]:
        raise LookupError("TRL's DPO has no label smoothing")
    if "batch" in (term.get("shift") for term in terms):
        raise LookupError("TRL's bco_pair has no shift")
    if len({term.get("beta", stand_in.beta) for term in terms}) > 1:
        raise LookupError("TRL has one beta for all terms")
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "ref_chosen_logps": pairs["reference_chosen"],
        "ref_rejected_logps": pairs["reference_rejected"],
    }
    loss = DPOTrainer._compute_loss(stand_in, lambda **_: said, inputs, return_outputs=False)
    metrics = {name: column[0] for name, column in stand_in._metrics["train"].items() if name.startswith("rewards/")}
    return {"loss": float(loss), **metrics}


def other_trainers(objective: dict[str, Any], values: dict[str, list[float]]) -> dict[str, float]:
    """What the losses of TRL's trainers without a reference say, the likelihood of chosen completions added here."""
    pairs = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    summed = pairs["chosen"], pairs["rejected"]
    means = summed[0] / pairs["chosen_tokens"], summed[1] / pairs["rejected_tokens"]
    kind = objective["type"]
    stand_in = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(device="cpu"),
        beta=objective["beta"],
        alpha=0.0,
        label_smoothing=0.0,
        loss_type="simpo" if kind == "SimPO" else "sigmoid",
        simpo_gamma=objective.get("gamma"),
    )
    if kind == "ORPO":
        ratio, chosen, rejected, *_ = ORPOTrainer.odds_ratio_loss(stand_in, *means)
        loss = -means[0] - ratio
    else:
        losses, chosen, rejected = CPOTrainer.cpo_loss(stand_in, *(means if kind == "SimPO" else summed))
        loss = losses - objective.get("alpha", 0.0) * means[0]
    earned = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
    return {"loss": float(loss.mean()), **{name: float(column.mean()) for name, column in earned.items()}}


def compare(values: dict[str, list[float]]) -> None:
    """Prints how far TRL is from the figures; refuses what is further than rounding."""
    if DPOTrainer is None:
        print("TRL is not installed, and was not asked")
        return
    even = {name: [37.0] * len(column) if name.endswith("tokens") else column for name, column in values.items()}
    for name, objective in CASES.items():
        kind = objective["type"]
        pairs = even if "ChosenSFT" in json.dumps(objective) else values
        try:
            ask = other_trainers if kind in ("ORPO", "SimPO", "CPO") else dpo_trainer
            theirs = ask(objective, pairs)
        except LookupError as reason:
            print(f"{name:22} not asked: {reason}")
            continue
        ours = figures(objective, pairs)
        keys = theirs.keys() & ours.keys()
        off = float(np.max([abs(theirs[key] - ours[key]) / max(abs(ours[key]), 1e-3) for key in keys]))
        bound = 1e-5 if kind == "ORPO" or "Alpha" in json.dumps(objective) else 1e-7
        print(f"{name:22} {off:.1e} of {len(keys)} figures")
        assert off < bound, (name, theirs, ours)


def main() -> None:
    """Pairs and figures, as JSON with twelve significant digits."""
    values = random_logps()
    compare(values)

    def short(value: Any) -> Any:
        return [short(item) for item in value] if isinstance(value, list) else float(f"{value:.12g}")

    def kept(result: dict[str, Any]) -> dict[str, Any]:
        return {key: short(value) for key, value in result.items()}

    cases = {name: {"objective": objective, **kept(figures(objective, values))} for name, objective in CASES.items()}
    text = ",\n".join(f'"{name}": {json.dumps(case)}' for name, case in cases.items())
    HERE.mkdir(exist_ok=True)
    (HERE / "figures.json").write_text(f'{{"pairs": {json.dumps(values)},\n"cases": {{\n{text}\n}}}}\n')


if __name__ == "__main__":
    main()
