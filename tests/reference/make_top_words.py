"""Makes the figures that tests/losses/test_teacher_top_k.py reads: TRL's distances over a teacher's likeliest words.

    /path/to/environment/with/trl/bin/python tests/reference/make_top_words.py

Writes tests/reference/policy/top_words.npz. Made with TRL 1.16.0 and torch 2.15: `loss_add_tail` of its distillation
from a server, with float64 logits and a teacher's words chosen here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

OUT = Path(__file__).with_name("policy")


def figures() -> dict[str, np.ndarray]:
    """Summed distances and their gradients by the student's logits, by beta, temperature and number of words."""
    draw = np.random.default_rng(9)
    student, teacher = draw.normal(0, 2, (2, 5, 13))
    result = {"student": student, "teacher": teacher}
    for beta in (0.0, 0.25, 0.5, 1.0):
        for temperature in (1.0, 2.5):
            for count in (1, 4):
                logits = torch.tensor(student, requires_grad=True)
                p, q = (torch.log_softmax(x / temperature, dim=-1) for x in (torch.tensor(teacher), logits))
                p, tokens = torch.topk(p, count, dim=-1)
                mask = torch.ones_like(tokens, dtype=torch.bool)
                (q, support), (p, _) = (_add_tail_bucket(x, mask) for x in (q.gather(-1, tokens), p))
                loss = _jsd_divergence(q, p, beta, support).sum()
                loss.backward()
                result[f"{beta}/{temperature}/{count}.loss"] = loss.detach().numpy()
                result[f"{beta}/{temperature}/{count}.gradient"] = logits.grad.numpy()
                result[f"{temperature}/{count}.words"] = tokens.numpy()
                result[f"{temperature}/{count}.logp"] = p.numpy()
    return result


if __name__ == "__main__":
    np.savez_compressed(OUT / "top_words.npz", **figures())
