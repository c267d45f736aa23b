"""What curves are drawn over: steps, tokens, or the time that steps took; knows columns of figures, no page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from .series import Columns

OVER = ("step", "tokens", "time")
UNITS = (("hours", 3600.0, 2 * 3600.0), ("minutes", 60.0, 120.0), ("seconds", 1.0, 0.0))
"""A unit, its seconds, and how much there must be for it to be used."""


@attrs.frozen(eq=False)
class Axis:
    """One way to place steps on the horizontal axis.

    Attributes:
        name: Of what is read off it.
        steps: Steps whose place is known, ascending; empty where the steps are the places themselves.
        places: Of these.
    """

    name: str
    steps: np.ndarray = attrs.field(factory=lambda: np.zeros(0))
    places: np.ndarray = attrs.field(factory=lambda: np.zeros(0))

    def at(self, steps: np.ndarray) -> np.ndarray:
        """Where some steps are; those between known ones lie between them."""
        return np.interp(steps, self.steps, self.places) if len(self.steps) else steps


def offered(runs: Sequence[Mapping[str, Columns]]) -> tuple[str, ...]:
    """What there is to choose from, for runs that share charts."""
    found = ["step"]
    if all("num_tokens" in run for run in runs):
        found.append("tokens")
        if all("tokens/s" in run for run in runs):
            found.append("time")
    return tuple(found)


def axes(over: str, runs: Sequence[Mapping[str, Columns]]) -> list[Axis]:
    """The axis of each of the runs, all in one unit; steps where they lack what is asked for.

    Time is that of the steps alone, their tokens over their tokens per second: what evaluations and breaks between
    attempts took is not in it; compiling is, in the step that waited for it.
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
    """Steps, and the seconds until the end of each."""
    steps, tokens = run["num_tokens"].arrays()
    paces_at, paces = run["tokens/s"].arrays()
    valid = np.isfinite(paces) & (paces > 0)
    if not len(steps) or not valid.any():
        return np.zeros(0), np.zeros(0)
    pace = np.interp(steps, paces_at[valid], paces[valid])
    each = np.diff(tokens, prepend=0.0)
    return steps, np.cumsum(np.maximum(each, 0.0) / pace)
