"""The interval of a proportion that the pages show beside it. Independent of gradio."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054  # z score of a two-sided 95 % interval of the normal distribution


def wilson(right: int, count: int) -> tuple[float, float]:
    """Wilson score interval of the proportion `right / count` (Wilson 1927): valid for few rows, and at 0 and 1.

    >>> [round(end, 4) for end in wilson(8, 10)]
    [0.4902, 0.9433]
    """
    if count == 0:
        return 0.0, 1.0
    share, z, square = right / count, Z_95, Z_95 * Z_95
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
