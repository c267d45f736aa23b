"""Progress of a run on stderr: bars, lines, tables."""

from __future__ import annotations

import collections
import math
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

WINDOW = 200  # steps over which step time is averaged, evaluations and saves included
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Display:
    """A progress bar with the time left on a terminal, a plain line every few seconds elsewhere, nothing when quiet.

    Everything goes to stderr, so that stdout is free for `--json`. Rich markup in texts is not interpreted, and control
    characters (a model may write any) are escaped. A context manager.
    """

    def __init__(
        self,
        quiet: bool = False,
        console: Console | None = None,
        *,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prints nothing yet.

        Args:
            quiet: Whether to print nothing at all.
            console: Where to print; stderr if None.
            every_seconds: Seconds between lines where there is no terminal.
            clock: Time in seconds; replaced by tests.
        """
        self.quiet = quiet
        self.console = console or Console(stderr=True, highlight=False)
        self._every_seconds = every_seconds
        self._clock = clock
        self._bars: _Bars | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._past: collections.deque[tuple[float, int]] = collections.deque(maxlen=WINDOW)
        self._left: int | None = None
        self._last_line = -math.inf

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the stage at the rate of the last steps; None before the second step of this process.

        The first step is not counted, since it includes compilation.
        """
        if self._left is None or len(self._past) < 2:
            return None
        (began, first), (ended, last) = self._past[0], self._past[-1]
        return self._left * (ended - began) / (last - first) if last > first else None

    def stage(self, name: str, total: int | None = None, *, unit: str = "steps") -> None:
        """Begins a stage: with a bar if the `total` of its steps is given, else with a spinner."""
        self._stage = clean(name)
        self._past.clear()
        self._left = None
        self._last_line = -math.inf
        if self.quiet:
            return
        if not self.console.is_terminal:
            self._print(Text(f"{self._stage} ..." if total is None else f"{self._stage}: {total:,} {unit}"))
            return
        if self._bars is None:
            self._bars = _Bars(self.console)
            self._bars.start()
        self._leave_stage(self._bars)
        self._bars.figures = ""
        self._task = self._bars.add_task(self._stage, total=total)

    def step(self, step: int, total: int, metrics: Mapping[str, float], rates: Mapping[str, float]) -> None:
        """Shows that `step` of `total` steps are done, with metrics and rates per second (by unit)."""
        now = self._clock()
        self._past.append((now, step))
        self._left = total - step
        if self.quiet:
            return
        figures = [f"{clean(name).rsplit('/', 1)[-1]} {number(value)}" for name, value in metrics.items()]
        figures += [f"{thousands(value)} {clean(unit)}" for unit, value in rates.items()]
        if self._bars is not None and self._task is not None:
            self._bars.figures = "  ".join(figures)
            self._bars.update(self._task, completed=step, total=total, eta=self.eta_seconds)
        elif step == total or now - self._last_line >= self._every_seconds:
            self._last_line = now
            left = [f"{duration(self.eta_seconds)} left"] if self.eta_seconds is not None and step < total else []
            self._print(Text("  ".join([f"step {step}/{total}", *figures, *left])))

    def note(self, text: str) -> None:
        """Shows a text below the bar until the next step; does nothing without a bar."""
        if self._bars is not None:
            self._bars.figures = clean(text)

    def say(self, text: str) -> None:
        """Prints a text, above the bar if there is one."""
        if not self.quiet:
            self._print(Text(clean(text)))

    def final_table(self, rows: Sequence[Mapping[str, object]], *, title: str | None = None) -> None:
        """Closes the bar and prints rows as a table; the columns are their keys in order of appearance."""
        self.close()
        if self.quiet or not rows:
            return
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(box=box.SIMPLE_HEAD, title=None if title is None else Text(clean(title)), title_justify="left")
        for name in columns:
            is_number = all(isinstance(row.get(name), int | float | None) for row in rows)
            table.add_column(Text(clean(name)), justify="right" if is_number else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(_cell(row.get(name))) for name in columns))
        self.console.print(table)

    def side_by_side(self, prompt: str, policy: str, reference: str) -> None:
        """Prints a prompt, and under it the completions of policy and reference in two columns."""
        if self.quiet:
            return
        answers = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), pad_edge=False)
        for heading in ("policy", "reference"):
            answers.add_column(heading, ratio=1, overflow="fold")
        answers.add_row(Text(clean(policy.strip())), Text(clean(reference.strip())))
        question = Padding(Text(clean(prompt.strip()), style="bold"), (0, 1))
        self.console.print(Group(question, answers))

    def close(self) -> None:
        """Stops the bar, which stays on the screen; a later `stage` begins another."""
        if self._bars is not None:
            self._leave_stage(self._bars)
            self._bars.stop()
            self._bars = None

    def _leave_stage(self, bars: _Bars) -> None:
        """Stops the bar of the last stage, or removes its spinner."""
        if self._task is None:
            return
        task = next(task for task in bars.tasks if task.id == self._task)
        if task.total is None:
            bars.remove_task(self._task)
        else:
            bars.stop_task(self._task)
        self._task = None

    def _print(self, text: Text) -> None:
        # Outside a terminal each line is one record and is not folded.
        self.console.print(text, soft_wrap=not self.console.is_terminal)


class _Bars(Progress):
    """A line with the bar, and one below with the figures, which do not fit beside it in 80 columns."""

    def __init__(self, console: Console) -> None:
        self.figures = ""
        super().__init__(
            _OnlyWithoutTotal(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _TimeLeft(),
            console=console,
            expand=True,
            refresh_per_second=4,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.figures:
            yield Text(self.figures, no_wrap=True, overflow="ellipsis")


class _OnlyWithoutTotal(SpinnerColumn):
    def render(self, task: Task) -> RenderableType:
        return super().render(task) if task.total is None else Text("")


class _TimeLeft(ProgressColumn):
    def render(self, task: Task) -> RenderableType:
        eta: float | None = task.fields.get("eta")
        return Text("" if eta is None or task.total is None else f"{duration(eta)} left")


def clean(text: str) -> str:
    r"""The text with control characters, lone surrogates and bidirectional marks escaped (`\x1b`).

    Newlines stay, a tab becomes four spaces.
    """
    return "".join(_clean_character(character) for character in text.replace("\r\n", "\n").replace("\t", "    "))


def _clean_character(character: str) -> str:
    if character == "\n" or (unicodedata.category(character) not in ("Cc", "Cs") and character not in _BIDI):
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def number(value: float) -> str:
    """Four significant digits: `0.6931`, `1.5e-06`, `nan`; whole numbers whole."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def thousands(value: float) -> str:
    """A rate in three significant digits: `950`, `12.3k`, `1.2M`."""
    if not math.isfinite(value):
        return str(value)
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def duration(seconds: float) -> str:
    """`0:07`, `12:05`, `3:04:05`, `2d 03:04`; rounded up, so that 0:00 means the end."""
    whole = math.ceil(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, last = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{last:02d}" if hours else f"{minutes}:{last:02d}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return clean(str(value))
