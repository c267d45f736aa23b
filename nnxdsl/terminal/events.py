"""Progress events: phases, their progress, rows of metrics, messages. Prints nothing."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import attrs

WINDOW = 200
"""Reports of progress over which the speed of a phase is averaged, evaluations and saves included."""


@attrs.define(eq=False)
class Phase:
    """Something that may take a while.

    Attributes:
        name: What is done, such as "tokenizing data.jsonl"; without control characters.
        total: How many `unit`s there are; None if that is unknown.
        unit: "steps", "rows", "bytes", ...
        depth: 0 for a stage of a run, 1 for a phase within it, and so on.
        began: When it began, in seconds of the display's clock.
        done: How many `unit`s are done.
        figures: What is reported beside them, in short.
        seconds: How long it took; None while it runs.
        is_notable: Whether its end is reported however short it was.
    """

    name: str
    total: int | None
    unit: str
    depth: int
    began: float
    done: int = 0
    figures: str = ""
    seconds: float | None = None
    is_notable: bool = False
    _past: collections.deque[tuple[float, int]] = attrs.field(factory=lambda: collections.deque(maxlen=WINDOW))

    def report(self, done: int, now: float) -> None:
        """Records progress: `done` of `total`, at the time `now`."""
        self.done = done
        self._past.append((now, done))

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to its end at the rate of the last reports; None before the second one, or without a total.

        The time before the first report is not counted: of a training loop it includes compilation.
        """
        if self.total is None or len(self._past) < 2:
            return None
        (began, first), (ended, last) = self._past[0], self._past[-1]
        return (self.total - self.done) * (ended - began) / (last - first) if last > first else None


class Listener:
    """Receives what a display receives, in the process and thread that works; pass it to `Display(listeners=...)`.

    A subclass defines the methods that it needs. They are called often, so that one that draws limits its own rate.
    Phases nest: a phase ends after all that began within it.
    """

    def on_phase_begin(self, phase: Phase) -> None:
        """A phase has begun."""

    def on_progress(self, phase: Phase) -> None:
        """`phase.done` or `phase.figures` has changed: of a training loop, after each step."""

    def on_phase_end(self, phase: Phase) -> None:
        """A phase has ended, whole or not; `phase.seconds` is how long it took."""

    def on_metrics(self, row: Mapping[str, object]) -> None:
        """A row of metrics.jsonl (with `step` and `loss`) or of evaluations.jsonl (with `step` and `eval/...`)."""

    def on_message(self, text: str) -> None:
        """A line that people read."""

    def on_close(self) -> None:
        """Nothing more is shown, until another phase begins."""
