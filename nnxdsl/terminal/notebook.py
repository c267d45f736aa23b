"""Progress of a run in a Jupyter notebook: one output that is updated in place, with bars, curves and messages."""

from __future__ import annotations

import collections
import html
import importlib
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from nnxdsl.terminal.curve import curve
from nnxdsl.terminal.display import Display, clean, done_of, duration, ended_line
from nnxdsl.terminal.events import Listener, Phase

EVERY_SECONDS = 0.5
MAX_MESSAGES = 500
CURVES = ("loss", "reward", "rewards/accuracies", "mean_token_accuracy")
"""The metrics that are drawn, those that a run has, at most two; held-out ones (`eval/...`) as dots."""


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel; IPython is not loaded for it."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


def open_display(quiet: bool) -> Display:
    """A display for this process: on the page of a notebook, else on stderr."""
    if quiet or not in_notebook():
        return Display(quiet=quiet)
    return Display(quiet=True, listeners=[NotebookProgress()])


class NotebookProgress(Listener):
    """Draws what a display receives, at most every half second, in the thread that made it."""

    def __init__(self) -> None:
        """Shows nothing yet."""
        self._handle: Any = None
        self._last_draw = -math.inf
        self._thread = threading.get_ident()
        self._phases: list[Phase] = []
        self._messages: collections.deque[str] = collections.deque(maxlen=MAX_MESSAGES)
        self._series: dict[str, list[tuple[float, float]]] = {}

    def on_phase_begin(self, phase: Phase) -> None:
        """Adds its bar; the curves of an earlier run end where another stage with steps begins."""
        if not phase.depth and phase.unit == "steps" and phase.total is not None:
            self._series.clear()
        self._phases.append(phase)
        self._draw()

    def on_progress(self, phase: Phase) -> None:
        """Moves its bar."""
        self._draw()

    def on_phase_end(self, phase: Phase) -> None:
        """Removes its bar; of one that has lasted a while, leaves a line."""
        self._phases.remove(phase)
        if ended := ended_line(phase):
            self._messages.append(ended)
        self._draw()

    def on_metrics(self, row: Mapping[str, object]) -> None:
        """Adds to the curves."""
        step = row.get("step")
        for name in CURVES:
            for full in (name, f"eval/{name}"):
                value = row.get(full)
                if isinstance(step, int) and isinstance(value, int | float):
                    self._series.setdefault(full, []).append((step, value))
        self._draw()

    def on_message(self, text: str) -> None:
        """Adds a line."""
        self._messages.append(text)
        self._draw()

    def on_close(self) -> None:
        """Draws the end."""
        self._draw(is_last=True)

    def _draw(self, *, is_last: bool = False) -> None:
        # A kernel finds the cell of an output by the thread that writes it.
        now = time.monotonic()
        if threading.get_ident() != self._thread or (now - self._last_draw < EVERY_SECONDS and not is_last):
            return
        self._last_draw = now
        page = {"text/html": self.page(), "text/plain": self._messages[-1] if self._messages else ""}
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(page, raw=True, display_id=True)
        else:
            self._handle.update(page, raw=True)

    def page(self) -> str:
        """The output as HTML."""
        bars = "".join(map(_bar, self._phases))
        series = {name: (self._series.get(name, ()), self._series.get(f"eval/{name}", ())) for name in CURVES}
        shown = [(name, line, dots) for name, (line, dots) in series.items() if line or dots][:2]
        curves = "".join(curve(*one) for one in shown)
        messages = [html.escape(clean(text)) for text in self._messages]
        last = f"<div>{messages[-1]}</div>" if messages else ""
        older = "\n".join(messages[:-1])
        log = f"<details><summary>log</summary><pre>{older}</pre></details>" if older else ""
        return f"<div>{bars}<div>{curves}</div>{last}{log}</div>"


def _bar(phase: Phase) -> str:
    """A phase as a bar with its times and figures; without a total, a bar that moves."""
    amount, texts = "", []
    if phase.total is not None:
        amount = f' value="{phase.done}" max="{max(phase.total, 1)}"'
        texts.append(done_of(phase))
    if (eta := phase.eta_seconds) is not None and phase.done != phase.total:
        texts.append(f"{duration(eta)} left")
    texts.append(clean(phase.figures))
    indent = f"margin-left:{phase.depth}em"
    return (
        f'<div style="{indent}"><progress{amount}></progress> {html.escape(phase.name)} '
        f"{html.escape('  '.join(filter(None, texts)))}</div>"
    )
