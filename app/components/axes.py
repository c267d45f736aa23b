"""Horizontal axes of charts: steps, tokens, or training time. Works on metric columns, independent of pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from ..store.series import Columns

OVER = ("step", "tokens", "time")
UNITS = (("hours", 3600.0, 2 * 3600.0), ("minutes", 60.0, 120.0), ("seconds", 1.0, 0.0))
"""A time unit, its length in seconds, and the shortest duration for which it is used."""


@attrs.frozen(eq=False)
class Axis:
    """The positions of ascending steps on a horizontal axis; without steps, a position is the step itself."""

    name: str
    steps: np.ndarray = attrs.field(factory=lambda: np.zeros(0))
    places: np.ndarray = attrs.field(factory=lambda: np.zeros(0))

    def values_at(self, steps: np.ndarray) -> np.ndarray:
        """Positions of steps, linearly interpolated."""
        return np.interp(steps, self.steps, self.places) if len(self.steps) else steps


def offered(runs: Sequence[Mapping[str, Columns]]) -> tuple[str, ...]:
    """Axes that are available for runs in shared charts."""
    needed = {"step": set(), "tokens": {"num_tokens"}, "time": {"num_tokens", "tokens/s"}}
    return tuple(over for over in OVER if all(needed[over] <= run.keys() for run in runs))


def axes(over: str, runs: Sequence[Mapping[str, Columns]]) -> list[Axis]:
    """Returns one axis per run, all in the same unit; falls back to steps if a run lacks the metric.

    Time is the sum over steps of tokens / (tokens/s): it excludes evaluations and gaps between attempts, and includes
    compilation, in the step that triggered it.
    """
    if over not in offered(runs) or over == "step":
        return [Axis("step") for _ in runs]
    if over == "tokens":
        return [Axis("tokens", *run["num_tokens"].arrays()) for run in runs]
    timed = [_seconds(run) for run in runs]
    longest = max((float(places[-1]) for _, places in timed if len(places)), default=0.0)
    unit, length = next((name, length) for name, length, least in UNITS if longest >= least)
    return [Axis(f"{unit} of steps", steps, places / length) for steps, places in timed]


def _seconds(run: Mapping[str, Columns]) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the training seconds until the end of each."""
    steps, tokens = run["num_tokens"].arrays()
    paces_at, paces = run["tokens/s"].arrays()
    valid = np.isfinite(paces) & (paces > 0)
    if not len(steps) or not valid.any():
        return np.zeros(0), np.zeros(0)
    pace = np.interp(steps, paces_at[valid], paces[valid])
    each = np.diff(tokens, prepend=0.0)
    return steps, np.cumsum(np.maximum(each, 0.0) / pace)
