"""A curve as one line of plain text."""

from __future__ import annotations

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], most: int = 16) -> str:
    """Finite values, or a sample of so many of them, as a line of block characters; empty for fewer than two.

    >>> sparkline([3.0, 2.0, 1.0, 1.0])
    '█▅▁▁'
    """
    if len(values) < 2:
        return ""
    count = min(most, len(values))
    values = [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]
    low, high = min(values), max(values)
    return "".join(BARS[int((value - low) / ((high - low) or 1.0) * (len(BARS) - 1) + 0.5)] for value in values)
