"""Statistics of held-out pairs: accuracy with a confidence interval, margins. Independent of pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

Z_95 = 1.959963984540054
"""z score of a two-sided 95 % interval of the normal distribution."""


def wilson(right: int, count: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval of the proportion `right / count` (Wilson 1927): valid for few rows, and at 0 and 1.

    >>> [round(end, 4) for end in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if count == 0:
        return 0.0, 1.0
    share, square = right / count, z * z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


@attrs.frozen
class Group:
    """Statistics of a group of pairs: count, number ranked correctly, mean margin."""

    count: int
    right: int
    margin: float | None

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Group:
        """Computes the statistics over rows that have a margin."""
        margins = [value for row in rows if (value := reward(row, "margins")) is not None]
        return cls(len(margins), sum(value > 0 for value in margins), float(np.mean(margins)) if margins else None)

    @property
    def accuracy(self) -> float | None:
        """Fraction of pairs whose chosen answer has the larger reward."""
        return self.right / self.count if self.count else None


def reward(row: Mapping[str, Any], name: str) -> float | None:
    """Implicit reward of one answer, "chosen" or "rejected", or their difference, "margins".

    Margins are log-ratios if the objective has no rewards.
    """
    found = row["rewards"].get(name)
    return found if isinstance(found, int | float) else None


def recorded_difference(rows: Sequence[Mapping[str, Any]], recorded: Mapping[str, float]) -> dict[str, float]:
    """Differences between means over all rows and the run's recorded metrics, by metric."""
    names = ("chosen", "rejected", "margins")
    ours = {f"eval/rewards/{name}": [row["rewards"].get(name) for row in rows] for name in names}
    ours |= {f"eval/logps/{name}": [row["policy"][at] for row in rows] for at, name in enumerate(names[:2])}
    return {
        name: float(np.mean(values)) - recorded[name]
        for name, values in ours.items()
        if name in recorded and values and None not in values
    }
