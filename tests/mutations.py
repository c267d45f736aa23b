"""Wrong formulas that the tests must notice: shows that their bounds are no wider than a mistake.

`python tests/mutations.py [NUMBER ...]` puts each mistake into a copy of the library, runs the tests about that
formula, and says which test noticed it. It ends with 1 if one went unnoticed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """One mistake.

    Attributes:
        file: below `nnxdsl/`.
        right: what stands there once.
        wrong: what replaces it.
        tests: what should notice it.
    """

    file: str
    right: str
    wrong: str
    tests: str


MUTATIONS = (
    Mutation(
        "models/layers/norm.py",
        "keepdims=True) + eps)\n    if kind",
        "keepdims=True) + 10 * eps)\n    if kind",
        "models/test_families.py",
    ),
    Mutation(
        "models/layers/norm.py",
        "keepdims=True) + eps)\n    if kind",
        "keepdims=True)) + eps\n    if kind",
        "models/test_families.py",
    ),
    Mutation(
        "models/attention/dot_product.py",
        "preferred_element_type=jnp.float32) * scale",
        "preferred_element_type=jnp.float32) * (scale * 1.01)",
        "models/test_families.py",
    ),
    Mutation(
        "models/attention/mask.py",
        "query.positions - key.positions < window",
        "query.positions - key.positions <= window",
        "models/test_families.py",
    ),
    Mutation(
        "models/attention/mask.py",
        "(key.positions <= query.positions)",
        "(key.positions < query.positions)",
        "models/test_families.py",
    ),
    Mutation(
        "models/attention/dot_product.py",
        "soft_cap * jnp.tanh(scores / soft_cap)",
        "soft_cap * jnp.tanh(scores / (soft_cap * 1.01))",
        "models/test_families.py",
    ),
    Mutation(
        "models/layers/rope.py",
        "np.float32(rope.theta) ** exponent",
        "np.float32(rope.theta * 1.01) ** exponent",
        "models/test_families.py",
    ),
    Mutation(
        "models/attention/splash.py",
        "jnp.asarray(scale, query.dtype)",
        "jnp.asarray(scale * 1.001, query.dtype)",
        "models/test_attention_kernels.py",
    ),
    Mutation(
        "losses/preference.py",
        "margin_loss(objective, beta, lambda d: smoothed(beta * d, smoothing))",
        "margin_loss(objective, beta, lambda d: smoothed(beta * 1.001 * d, smoothing))",
        "losses/test_preference.py",
    ),
    Mutation(
        "losses/policy_gradient.py",
        "low, high = 1 - epsilon, 1 + (",
        "low, high = 1 - epsilon, 1 - (",
        "losses/test_policy_gradient.py",
    ),
    Mutation(
        "program/batches/sequences.py",
        "batch.tokens[:, 1:], batch.loss_mask[:, 1:])\n",
        "batch.tokens[:, 1:], batch.loss_mask[:, :-1])\n",
        "program/test_replay.py",
    ),
    Mutation(
        "losses/lm_head/selected_logits.py",
        "jnp.exp(running_max - new_max) * sum_exp\n",
        "sum_exp\n",
        "losses/test_teacher_top_k.py",
    ),
    Mutation(
        "optim/optimizers.py",
        "eps=optimizer.eps)\n    direction",
        "eps=optimizer.eps * 100)\n    direction",
        "program/test_replay.py",
    ),
)


def noticed(mutation: Mutation, place: Path) -> str:
    """Returns the tests that fail with a mistake, an empty string where none does."""
    file = place / "nnxdsl" / mutation.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutation.right) == 1, f"{mutation.file} has {text.count(mutation.right)} of {mutation.right!r}"
    file.write_text(text.replace(mutation.right, mutation.wrong), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        f"tests/{mutation.tests}",
    ]
    done = subprocess.run(
        command, cwd=place, env={**os.environ, "PYTHONPATH": str(place)}, capture_output=True, text=True, check=False
    )
    file.write_text(text, encoding="utf-8")
    result = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    assert bool(result) == (done.returncode == 1), done.stdout[-2000:]
    return " ".join(result)


def main(numbers: list[int]) -> int:
    """Tries the mistakes of these numbers, or all; returns how many no test noticed."""
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for name in ("nnxdsl", "app", "tests", "experiments", "docs"):
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, place / name)
        for number in numbers or range(len(MUTATIONS)):
            mutation = MUTATIONS[number]
            test = noticed(mutation, place)
            missed += not test
            print(
                f"{number:2d} {mutation.file}: {mutation.right!r} -> {mutation.wrong!r}: {test or 'NOT NOTICED'}",
                flush=True,
            )
    return missed


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]) > 0)
