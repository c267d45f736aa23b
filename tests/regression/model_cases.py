"""Every stored model of a family: its logits with padding, and what it answers, with the cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import materials
import numpy as np
import results
from results import Result

import nnxdsl
from nnxdsl import Tokenizer

TOKENS = np.arange(3 * 12).reshape(3, 12) * 29 % 94 + 2
MASK = np.array([[1] * 12, [0] * 4 + [1] * 8, [1] * 7 + [0] * 5])
PROMPTS = ("t5 t17 t2 t80 t33", "t9", "t44 t3 t61 t7 t7 t90 t12 t28")
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 7}
LIKE_OTHERS = {"deepseek_v3_plain", "llama3_tied", "mistral_global", "qwen2_windows", "qwen3_moe_plain"}
"""Second models of their families: no answers are asked of them, which would take as long again."""


def _model(family: str) -> Callable[[], Result]:
    def case() -> Result:
        model = nnxdsl.load(f"families/{family}", tokenizer=Tokenizer.File("tokenizer"))
        logits = np.asarray(model(TOKENS, MASK))[MASK.astype(bool)]  # [tokens, V]
        answers = {}
        if family not in LIKE_OTHERS:
            answers["greedy"] = model.generate(PROMPTS, max_new_tokens=10)
            answers["sampled"] = model.generate(PROMPTS, max_new_tokens=10, **SAMPLED)
        return {
            "series": {"logits": [results.shortened(value) for value in logits[::5, ::13].ravel()]},
            "sums": {"logits": results.magnitudes([logits])},
            "bits": {"logits": results.of_array(logits)},
            "exact": answers,
        }

    return case


CASES: dict[str, Callable[[], Result]] = {
    f"model-{path.name.replace('_', '-')}": _model(path.name) for path in sorted(materials.FAMILIES.iterdir())
}
