"""Statistics of held-out pairs: accuracy with a confidence interval, correlation, margins. Independent of pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

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


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson correlation; None if undefined.

    >>> round(correlation([1, 2, 3], [2, 4, 6]), 9)
    1.0
    """
    count = len(x)
    if count < 3:
        return None
    mean_x, mean_y = sum(x) / count, sum(y) / count
    spread_x = math.sqrt(sum((one - mean_x) ** 2 for one in x))
    spread_y = math.sqrt(sum((one - mean_y) ** 2 for one in y))
    if spread_x == 0 or spread_y == 0:
        return None
    together = sum((one - mean_x) * (other - mean_y) for one, other in zip(x, y, strict=True))
    return max(-1.0, min(1.0, together / (spread_x * spread_y)))


@attrs.frozen
class Group:
    """Statistics of a group of pairs: count, number ranked correctly, mean margin."""

    count: int
    right: int
    margin: float | None

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Group:
        """Computes the statistics over rows that have a margin."""
        margins = [margin(row) for row in rows]
        finite = [value for value in margins if value is not None]
        return cls(len(finite), sum(value > 0 for value in finite), sum(finite) / len(finite) if finite else None)

    @property
    def accuracy(self) -> float | None:
        """Fraction of pairs whose chosen answer has the larger reward."""
        return self.right / self.count if self.count else None


def margin(row: Mapping[str, Any]) -> float | None:
    """Reward of the chosen answer minus that of the rejected one; log-ratios if the objective has no rewards."""
    found = row["rewards"].get("margins")
    return found if isinstance(found, int | float) else None


def reward(row: Mapping[str, Any], side: str) -> float | None:
    """Implicit reward of one answer."""
    found = row["rewards"].get(side)
    return found if isinstance(found, int | float) else None


def recorded_difference(rows: Sequence[Mapping[str, Any]], recorded: Mapping[str, float]) -> dict[str, float]:
    """Differences between means over all rows and the run's recorded metrics, by metric."""
    ours: dict[str, list[float | None]] = {f"eval/rewards/{name}": [] for name in ("chosen", "rejected", "margins")}
    for row in rows:
        for name in ("chosen", "rejected", "margins"):
            ours[f"eval/rewards/{name}"].append(row["rewards"].get(name))
    for number, side in enumerate(("chosen", "rejected")):
        ours[f"eval/logps/{side}"] = [row["policy"][number] for row in rows]
    found: dict[str, float] = {}
    for name, values in ours.items():
        finite = [value for value in values if value is not None]
        if finite and len(finite) == len(values) and name in recorded:
            found[name] = sum(finite) / len(finite) - recorded[name]
    return found
