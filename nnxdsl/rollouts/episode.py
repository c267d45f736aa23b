"""A completion of a prompt in tokens, with its rewards; what was sampled is never tokenized again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np


@attrs.frozen
class Episode:
    """A completion that a policy sampled.

    Attributes:
        row: The row of its prompt.
        ids: Its token ids, stop tokens included.
        is_sampled: Which of them the policy sampled; the others are of an environment's observations.
        logps: Log-probability of each under the sampler, at the temperature and among all tokens, float32; 0 of others.
        is_truncated: Whether it reached the maximal length before its end.
        text: The text of its last completion, without the token that ends it.
        turns: Completions and observations as messages, where there is an environment.
        rewards: What each reward function gave, not weighted; NaN where it does not apply.
        extra: What reward functions recorded, by column.
        calls: How many tools its completions have called; None where there are none.
        failures: How many of these calls failed.
        teacher_logps: Log-probability of each token under a teacher behind a server, float32; None without one.
        teacher_top_k: Its most likely tokens `[n, k]`, and their log-probabilities and that of all others `[n, k + 1]`,
            in place of `teacher_logps`; not stored, since the batch has them.
        teacher_id: The name of that teacher, where there are several.
        routed_experts: The experts of the tokens of its prompt and of these, `[tokens, layers, k]`; None without. Not
            stored, since the batch has them.
    """

    row: int
    ids: list[int]
    is_sampled: list[bool]
    logps: np.ndarray
    is_truncated: bool
    text: str
    turns: Sequence[Mapping[str, Any]]
    rewards: tuple[float, ...]
    extra: Mapping[str, Any]
    calls: int | None = None
    failures: int = 0
    teacher_logps: np.ndarray | None = None
    teacher_top_k: tuple[np.ndarray, np.ndarray] | None = None
    teacher_id: str | None = None
    routed_experts: np.ndarray | None = None

    def stored(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **attrs.asdict(self, recurse=False),
            "logps": self.logps.tolist(),
            "teacher_logps": None if self.teacher_logps is None else self.teacher_logps.tolist(),
            "teacher_top_k": None,
            "routed_experts": None,
            "turns": [dict(one) for one in self.turns],
        }

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> Episode:
        """The episode of `stored`."""
        teacher_logps = stored.get("teacher_logps")
        arrays = {
            "logps": np.asarray(stored["logps"], np.float32),
            "teacher_logps": None if teacher_logps is None else np.asarray(teacher_logps, np.float32),
            "rewards": tuple(stored["rewards"]),
        }
        return cls(**{**stored, **arrays})
