"""Figures of TRL's losses of answers and of distillation, in float64: what TRL's own code makes of drawn numbers.

    /path/to/environment/with/trl/bin/python tests/reference/make_policy.py

Writes tests/reference/policy/grpo.npz, rloo.npz and jsd.npz. Made with TRL 1.16.0 and torch 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gkd import GKDTrainer

OUT = Path(__file__).with_name("policy")
GROUPS, SIZE, LENGTH, LIMIT = 3, 4, 7, 9
LOW, HIGH, BETA = 0.2, 0.28, 0.3
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "delta": {"delta": 1.35},
    "gspo": {"importance_sampling_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo"},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.01,
        "epsilon_high": 0.02,
    },
    "vespo": {"loss_type": "vespo"},
    "corrected": {"use_bias_correction_kl": True},
    "gspo_corrected": {"importance_sampling_level": "sequence", "use_bias_correction_kl": True},
}
"""Settings of TRL's trainer that differ from the first."""
ENTROPY: dict[str, dict[str, Any]] = {
    "bonus": {"entropy_coef": 0.05},
    "quantile": {"top_entropy_quantile": 0.4},
    "quantile_gspo": {"top_entropy_quantile": 0.4, "importance_sampling_level": "sequence"},
    "both": {"entropy_coef": 0.05, "top_entropy_quantile": 0.4, "loss_type": "dapo"},
}
"""Settings of TRL's trainer that read entropies."""
ADAPTIVE = {"entropy_target": 0.7, "entropy_coef_delta": 0.04, "entropy_coef_min": 0.05, "entropy_coef_max": 0.15}
"""Settings of TRL's adaptive entropy."""
FACTORS = np.array([1.0, 0.5, 0.6, 0.7, 2.0, 0.4, 3.0, 3.0, 3.0, 0.9])
"""Of the entropies of one step after another."""
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
"""TRL's `vllm_importance_sampling_mode`."""
CLIP_MIN, CLIP_MAX = 0.7, 1.5
MASKED = 0.02
"""TRL's `off_policy_mask_threshold`."""


def random_arrays() -> dict[str, np.ndarray]:
    """Log-probabilities of policy, drawing policy and reference, rewards, and lengths of answers."""
    draw = np.random.default_rng(7)
    rows = GROUPS * SIZE
    logp = -draw.exponential(1.0, (rows, LENGTH))
    result = {
        "logp": logp,
        "old": logp + draw.normal(0, 0.3, logp.shape),
        "reference": logp + draw.normal(0, 0.5, logp.shape),
        "rewards": np.round(draw.normal(0, 1, (GROUPS, SIZE)), 2),
        "lengths": draw.integers(1, LENGTH + 1, rows),
    }
    result["rewards"][1] = 0.5  # a group that tells nothing
    result["sampler"] = result["old"] + draw.normal(0, 0.25, logp.shape)
    result["entropy"] = draw.exponential(0.7, logp.shape)
    return result


def trainer(settings: dict[str, Any], logp: torch.Tensor, entropy: torch.Tensor) -> Any:
    """What `_compute_loss` of GRPO's and RLOO's trainers reads of a trainer."""
    nothing = SimpleNamespace(
        reduce=lambda x, reduction: x,
        gather=lambda x: x,
        pad_across_processes=lambda x, dim, pad_index: x,
        num_processes=1,
        sync_gradients=True,
    )
    ours = dict(settings)
    args = SimpleNamespace(
        use_bias_correction_kl=ours.pop("use_bias_correction_kl", False),
        delta=ours.pop("delta", None),
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    fields = {
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (logp, entropy, None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "get_gamma_weights": GRPOTrainer.get_gamma_weights,
        "importance_sampling_level": "token",
        "beta": BETA,
        "args": args,
        "loss_type": "grpo",
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "use_vllm": "correction" in ours,
        "vllm_importance_sampling_correction": ours.pop("correction", None),
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LIMIT,
        "accelerator": nothing,
        "_entropy_bonus_enabled": "entropy_coef" in ours,
        "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)},
    }
    self = SimpleNamespace(**{**fields, **ours})
    self.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, self)
    return self


def grpo() -> dict[str, np.ndarray]:
    """Loss, gradient by log-probabilities, and metrics, by setting."""
    result = random_arrays()
    rewards = torch.tensor(result["rewards"])
    # As in `_generate_and_score_completions`, for scale_rewards="group".
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    result["advantage"] = advantage.numpy()
    for name, settings in SETTINGS.items():
        result |= {f"{name}.{key}": value for key, value in computed(GRPOTrainer, settings, result, advantage).items()}
    for name, settings in ENTROPY.items():
        result |= {f"{name}.{key}": value for key, value in computed(GRPOTrainer, settings, result, advantage).items()}
    result |= {f"adaptive.{key}": value for key, value in adaptive(result, advantage).items()}
    settings = {"loss_type": "dapo", "off_policy_mask_threshold": MASKED}
    result |= {f"masked.{key}": value for key, value in computed(GRPOTrainer, settings, result, advantage).items()}
    for mode in CORRECTIONS:
        if mode.startswith("token"):
            settings = {"loss_type": "vespo", "correction": mode, "use_bias_correction_kl": True}
            values = computed(GRPOTrainer, settings, result, advantage)
            result |= {f"vespo_{mode}.{key}": value for key, value in values.items()}
        settings = {"loss_type": "dapo", "correction": mode}
        result |= {f"{mode}.{key}": value for key, value in computed(GRPOTrainer, settings, result, advantage).items()}
    return result


def ratios(mode: str, samples: dict[str, np.ndarray]) -> torch.Tensor:
    """`[B, N]` or `[B, 1]` as in `_generate_and_score_completions`, under "Compute the importance sampling ratio"."""
    level, kind = mode.split("_")
    logs = np.where(np.arange(LENGTH) < samples["lengths"][:, None], samples["old"] - samples["sampler"], 0.0)
    raw = np.exp(logs if level == "token" else logs.sum(1, keepdims=True))
    is_out = (raw < CLIP_MIN) | (raw > CLIP_MAX)
    return torch.tensor(np.clip(raw, CLIP_MIN, CLIP_MAX) if kind == "truncate" else np.where(is_out, 0.0, raw))


def computed(
    cls: Any, settings: dict[str, Any], samples: dict[str, np.ndarray], advantage: torch.Tensor
) -> dict[str, np.ndarray]:
    """Loss, gradient by log-probabilities, and metrics of a trainer's class."""
    logp = torch.tensor(samples["logp"], requires_grad=True)
    entropy = torch.tensor(samples["entropy"], requires_grad=True)
    self = trainer(settings, logp, entropy)
    inputs = inputs_of(samples, advantage)
    if "correction" in settings:
        inputs["importance_sampling_ratio"] = ratios(settings["correction"], samples)
    loss = cls._compute_loss(self, None, inputs)
    loss.backward()
    metrics = {name: np.array(values[0]) for name, values in self._metrics["train"].items() if name != "entropy"}
    by_entropy = {} if entropy.grad is None else {"entropy_gradient": entropy.grad.numpy()}
    return {"loss": loss.detach().numpy(), "gradient": logp.grad.numpy(), **by_entropy, **metrics}


def adaptive(samples: dict[str, np.ndarray], advantage: torch.Tensor) -> dict[str, np.ndarray]:
    """Losses of steps with other entropies, and the coefficient after each, which is 0.1 at first."""
    logp, entropy = torch.tensor(samples["logp"]), torch.tensor(samples["entropy"])
    self = trainer({"entropy_coef": 0.1}, logp, entropy)
    self.use_adaptive_entropy, self._last_world_entropy, self._entropy_window_stats = True, float("inf"), None
    vars(self.args).update(ADAPTIVE)
    losses = []
    for factor in FACTORS:
        self._get_per_token_logps_and_entropies = lambda *args, factor=factor, **kwargs: (logp, factor * entropy, None)
        losses.append(GRPOTrainer._compute_loss(self, None, inputs_of(samples, advantage)).item())
    return {"factors": FACTORS, "loss": np.array(losses), "coef": np.array(self._metrics["train"]["entropy_coef"])}


def inputs_of(samples: dict[str, np.ndarray], advantage: torch.Tensor) -> dict[str, Any]:
    """A batch as TRL's trainers have it."""
    mask = torch.tensor(np.arange(LENGTH) < samples["lengths"][:, None]).double()
    ids = torch.zeros(mask.shape, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantage.reshape(-1),
        "sampling_per_token_logps": torch.tensor(samples["sampler"]),
        "old_per_token_logps": torch.tensor(samples["old"]),
        "ref_per_token_logps": torch.tensor(samples["reference"]),
        "old_logps": (torch.tensor(samples["old"]) * mask).sum(1),
        "num_items_in_batch": mask.sum(),
    }


def rloo() -> dict[str, np.ndarray]:
    """As `grpo`, of RLOO with the KL divergence in the reward."""
    result = random_arrays()
    mask = np.arange(LENGTH) < result["lengths"][:, None]
    # As in `RLOOTrainer._generate_and_score_completions`: k1 of the policy that sampled, leave-one-out baseline.
    kl = ((result["old"] - result["reference"]) * mask).sum(1).reshape(GROUPS, SIZE)
    rewards = torch.tensor(result["rewards"] - BETA * kl)
    advantage = rewards - (rewards.sum(1, keepdim=True) - rewards) / (SIZE - 1)
    return {"advantage": advantage.numpy(), **computed(RLOOTrainer, {}, result, advantage)}


def jsd() -> dict[str, np.ndarray]:
    """Summed divergences and their gradients by the student's logits, by beta and temperature."""
    draw = np.random.default_rng(8)
    student, teacher = draw.normal(0, 2, (2, 5, 11))
    result = {"student": student, "teacher": teacher}
    for beta in (0.0, 0.25, 0.5, 1.0):
        for temperature in (1.0, 2.5):
            logits = torch.tensor(student, requires_grad=True)
            loss = GKDTrainer.generalized_jsd_loss(
                logits[None], torch.tensor(teacher)[None], beta=beta, temperature=temperature, reduction="sum"
            )
            loss.backward()
            result[f"{beta}/{temperature}.loss"] = loss.detach().numpy()
            result[f"{beta}/{temperature}.gradient"] = logits.grad.numpy()
    return result


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    np.savez_compressed(OUT / "grpo.npz", **grpo())
    np.savez_compressed(OUT / "rloo.npz", **rloo())
    np.savez_compressed(OUT / "jsd.npz", **jsd())
