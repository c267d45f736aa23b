"""The losses of single answers in float64, written down from the papers, with gradients by torch; stored as figures.

One command, from the repository's root (figures stored here: torch 2.15, TRL 1.16):

    python tests/reference/make_feedback.py             # with torch, and TRL as a second opinion where it is installed

Nothing of nnxdsl is imported here. Answers are those of `make_objectives.py`: its chosen ones are the answers
themselves, its rejected ones mismatched answers to the same prompts, and every third answer is undesirable. TRL's own
loss must agree within 1e-7.
"""

from __future__ import annotations

import collections
import json
import types
from typing import Any

import torch
from make_objectives import HERE, random_logps, sigmoid

try:
    from trl import KTOTrainer
except ImportError:
    KTOTrainer = None

CASES: dict[str, dict[str, Any]] = {
    "kto": {"type": "KTO", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "kto weighted": {"type": "KTO", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7},
}
MOVED = {"far": -30.0, "near": 30.0}
"""Nats by which the policy finds mismatched answers likelier, so that their mean is below 0 or above."""


def figures(objective: dict[str, Any], values: dict[str, list[float]]) -> dict[str, Any]:
    """Loss, its gradient by the policy's log-probabilities of both kinds of answer, and the metrics."""
    columns = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    ours, other = (columns[name].requires_grad_(True) for name in ("chosen", "rejected"))
    liked, beta = columns["desirable"].bool(), objective["beta"]
    ratio = ours - columns["reference_chosen"]
    kl = (other - columns["reference_rejected"]).mean().clamp(min=0).detach()
    gain = objective["desirable_weight"] * (1 - sigmoid(beta * (ratio - kl)))
    pain = objective["undesirable_weight"] * (1 - sigmoid(beta * (kl - ratio)))
    each = torch.where(liked, gain, pain)
    by_own, by_other = torch.autograd.grad(
        each.mean() + 0 * other.sum(), (ours, other), allow_unused=True, materialize_grads=True
    )
    rewards = beta * ratio
    result = {
        "loss": each.mean(),
        "by_chosen": by_own,
        "by_rejected": by_other,
        "kl": kl,
        "rewards/chosen": rewards[liked].mean(),
        "rewards/rejected": rewards[~liked].mean(),
        "rewards/margins": rewards[liked].mean() - rewards[~liked].mean(),
        "logps/chosen": ours[liked].mean(),
        "logps/rejected": ours[~liked].mean(),
    }
    return {name: value.detach().tolist() for name, value in result.items()}


def theirs(objective: dict[str, Any], values: dict[str, list[float]]) -> dict[str, float]:
    """What TRL's KTOTrainer says of a model that gives these log-probabilities."""
    columns = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    rows = len(columns["chosen"])
    mask = torch.ones(rows, 2, dtype=torch.long)
    mask[:, 0] = 0  # one token of a prompt, and one of the completion
    said = types.SimpleNamespace(
        log_probs=columns["chosen"][:, None], entropy=torch.zeros(rows, 1), mean_logits=torch.zeros(rows, 1)
    )

    class Model:
        training = True

        def __call__(self, **_: Any) -> Any:
            return said

    stand_in = types.SimpleNamespace(
        model=Model(),
        accelerator=types.SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        args=types.SimpleNamespace(gradient_checkpointing_kwargs=None),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        _compute_kl_logps=lambda model, batch: columns["rejected"],
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        **{name: value for name, value in objective.items() if name != "type"},
    )
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "label": columns["desirable"].bool(),
        "ref_logps": columns["reference_chosen"],
        "ref_KL_logps": columns["reference_rejected"],
    }
    loss = KTOTrainer._compute_loss(stand_in, stand_in.model, inputs, return_outputs=False)
    return {"loss": float(loss), **{name: column[0] for name, column in stand_in._metrics["train"].items()}}


def main() -> None:
    """Answers and figures, as JSON with twelve significant digits."""

    def short(value: Any) -> Any:
        return [short(item) for item in value] if isinstance(value, list) else float(f"{value:.12g}")

    plain = random_logps()
    plain["desirable"] = [float(row % 3 != 1) for row in range(len(plain["chosen"]))]
    sets = {name: {**plain, "rejected": [x + by for x in plain["rejected"]]} for name, by in MOVED.items()}
    stored: dict[str, Any] = {"answers": sets, "cases": {}}
    for name, objective in CASES.items():
        for which, values in sets.items():
            ours = figures(objective, values)
            if KTOTrainer is not None:
                asked = theirs(objective, values)
                keys = asked.keys() & ours.keys()
                off = max(abs(asked[key] - ours[key]) / max(abs(ours[key]), 1e-3) for key in keys)
                print(f"{name:14} {which:5} {off:.1e} of {sorted(keys)}")
                assert off < 1e-7, (asked, ours)
            case = {key: short(value) for key, value in ours.items()}
            stored["cases"][f"{name}, {which}"] = {"objective": objective, "answers": which, **case}
    (HERE / "feedback.json").write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
