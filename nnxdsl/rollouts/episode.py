"""A completion of a prompt in tokens, with its rewards; what was sampled is never tokenized again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np


@attrs.frozen
class Episode:
    """A completion that a policy sampled.

    Attributes:
        row: The row of its prompt.
        ids: Its token ids, the stop token included where there is one.
        logps: Log-probability with which the sampler drew each, float32.
        is_truncated: Whether it reached the maximal length before its end.
        text: Its text, without the token that ends it.
        rewards: What each reward function gave, not weighted; NaN where it does not apply.
        extra: What reward functions recorded, by column.
    """

    row: int
    ids: list[int]
    logps: np.ndarray
    is_truncated: bool
    text: str
    rewards: tuple[float, ...]
    extra: Mapping[str, Any]
