"""Progress of a run on stderr: bars, lines, tables."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID
from rich.table import Column, Table
from rich.text import Text

from nnxdsl.terminal.events import Listener, Phase
from nnxdsl.terminal.plan_format import format_bytes

LONG_SECONDS = 3.0
"""A phase that lasts longer is worth a line."""
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Display:
    """A bar or a spinner with times for each phase on a terminal, plain lines elsewhere, nothing when quiet.

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
        listeners: Iterable[Listener] = (),
    ) -> None:
        """Prints nothing yet.

        Args:
            quiet: Whether to print nothing at all.
            console: Where to print; stderr if None.
            every_seconds: Seconds between lines where there is no terminal.
            clock: Time in seconds; replaced by tests.
            listeners: Receive all phases, metrics and messages, quiet or not; `listeners` may change later.
        """
        self.quiet = quiet
        self.console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._phases: list[Phase] = []
        self.listeners: list[Listener] = [*listeners]
        if not quiet:
            lines = Lines(self._print, every_seconds=every_seconds, clock=clock)
            self.listeners.insert(0, Bars(self.console, clock) if self.console.is_terminal else lines)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the stage at the rate of the last steps; see `Phase.eta_seconds`."""
        return self._phases[0].eta_seconds if self._phases else None

    def stage(self, name: str, total: int | None = None, *, unit: str = "steps") -> None:
        """Begins a stage, which lasts until the next one: with a bar if the `total` of its units is given."""
        self._end_all(0)
        self.begin(name, total, unit=unit)

    def begin(self, name: str, total: int | None = None, *, unit: str = "steps") -> Phase:
        """Begins a phase within those that have begun; `end` it."""
        phase = Phase(clean(name), total, unit, len(self._phases), self._clock())
        self._phases.append(phase)
        for listener in self.listeners:
            listener.on_phase_begin(phase)
        return phase

    def end(self, phase: Phase) -> None:
        """Ends a phase, and those within it; does nothing if it has ended."""
        if phase in self._phases:
            self._end_all(phase.depth)

    def advance(self, phase: Phase, done: int) -> None:
        """Shows that `done` of the units of a phase are done."""
        phase.report(done, self._clock())
        for listener in self.listeners:
            listener.on_progress(phase)

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None, *, unit: str = "steps") -> Iterator[Callable[[int], None]]:
        """A phase around a block, which is given a function that adds to the units that are done."""
        phase = self.begin(name, total, unit=unit)
        phase.report(0, phase.began)
        try:
            yield lambda count=1: self.advance(phase, phase.done + count)
        finally:
            self.end(phase)

    def step(self, step: int, total: int, metrics: Mapping[str, float], rates: Mapping[str, float]) -> None:
        """Shows that `step` of `total` steps of the stage are done, with metrics and rates per second (by unit)."""
        phase = self._phases[0] if self._phases else self.begin("progress", total)
        figures = [f"{clean(name).rsplit('/', 1)[-1]} {number(value)}" for name, value in metrics.items()]
        figures += [f"{thousands(value)} {clean(unit)}" for unit, value in rates.items()]
        phase.total, phase.figures = total, "  ".join(figures)
        self.advance(phase, step)

    def metrics(self, row: Mapping[str, object]) -> None:
        """Passes a row of metrics.jsonl or evaluations.jsonl on to the listeners."""
        for listener in self.listeners:
            listener.on_metrics(row)

    def say(self, text: str) -> None:
        """Prints a text, above the bar if there is one."""
        if not self.quiet:
            self._print(clean(text))
        for listener in self.listeners:
            listener.on_message(clean(text))

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
        """Ends all phases and stops the bars, which stay on the screen; a later `stage` begins others."""
        self._end_all(0)
        for listener in self.listeners:
            listener.on_close()

    def _end_all(self, depth: int) -> None:
        """Ends the phases of this depth and deeper, the innermost first."""
        while len(self._phases) > depth:
            phase = self._phases.pop()
            phase.seconds = self._clock() - phase.began
            for listener in self.listeners:
                listener.on_phase_end(phase)

    def _print(self, text: str) -> None:
        # Outside a terminal each line is one record and is not folded.
        self.console.print(Text(text), soft_wrap=not self.console.is_terminal)


class Lines(Listener):
    """Plain lines: the begin of a stage, the begin of a longer phase within it, their end, and progress now and then.

    Args:
        write: Writes a line.
        every_seconds: Seconds between lines of progress; None for no such lines.
        clock: As of the display.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        *,
        every_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._every_seconds, self._clock = write, every_seconds, clock
        self._last = -math.inf
        self._lock = threading.Lock()
        self._timers: dict[Phase, threading.Timer] = {}  # of phases whose begin is not written, the outermost first

    def on_phase_begin(self, phase: Phase) -> None:
        """Writes that a stage begins; that an inner phase has begun, only once it has lasted a while."""
        if not phase.depth:
            self._last = -math.inf
            self._write_begin(phase)
            return
        timer = threading.Timer(LONG_SECONDS, self._write_begins, [phase])
        timer.daemon = True
        with self._lock:
            self._timers[phase] = timer
        timer.start()

    def on_progress(self, phase: Phase) -> None:
        """Writes how far a phase is: of a training loop the first step and the last as well."""
        if self._every_seconds is None:
            return
        now, is_loop = self._clock(), phase.unit == "steps" and not phase.depth
        last = self._last if is_loop else max(self._last, phase.began)
        if now - last < self._every_seconds and not (is_loop and phase.done == phase.total):
            return
        self._last, eta = now, phase.eta_seconds
        left = [f"{duration(eta)} left"] if eta is not None and phase.done != phase.total else []
        name = "step" if is_loop else phase.name
        self._write("  ".join([f"{name} {done_of(phase)}", *([phase.figures] if phase.figures else []), *left]))

    def on_phase_end(self, phase: Phase) -> None:
        """Writes how long a longer phase took."""
        with self._lock:
            if timer := self._timers.pop(phase, None):
                timer.cancel()
        if ended := ended_line(phase):
            self._write(ended)

    def on_close(self) -> None:
        """Writes nothing more of phases that have begun."""
        with self._lock:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    def _write_begins(self, phase: Phase) -> None:
        """Writes that a phase has begun, after those around it."""
        with self._lock:
            while phase in self._timers:
                outer = next(iter(self._timers))
                del self._timers[outer]
                self._write_begin(outer)

    def _write_begin(self, phase: Phase) -> None:
        if phase.total is None:
            self._write(f"{phase.name} ...")
        else:
            total = format_bytes(phase.total) if phase.unit == "bytes" else f"{phase.total:,} {phase.unit}"
            self._write(f"{phase.name}: {total}")


def ended_line(phase: Phase) -> str | None:
    """`reading weights: 12.3 GiB in 0:45` for a phase that has lasted a while, or is notable."""
    if phase.seconds is None or (phase.seconds < LONG_SECONDS and not phase.is_notable):
        return None
    if phase.total is None:
        return f"{phase.name}: {duration(phase.seconds)}"
    amount = done_of(phase).rpartition("/")[2] if phase.done == phase.total else done_of(phase)
    unit = "" if phase.unit == "bytes" else f" {phase.unit}"
    return f"{phase.name}: {amount}{unit} in {duration(phase.seconds)}"


def done_of(phase: Phase) -> str:
    """`3/2000`, `1.5/12 MiB`."""
    if phase.unit != "bytes":
        return f"{phase.done}/{phase.total}"
    done, total = format_bytes(phase.done), format_bytes(phase.total or 0)
    is_same_unit = not phase.done or done.split()[1] == total.split()[1]
    return f"{done.split()[0] if is_same_unit else done}/{total}"


class Bars(Listener):
    """A bar or a spinner for each phase that runs, with times, and the figures of the innermost below."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._progress: _Progress | None = None
        self._tasks: dict[Phase, TaskID] = {}

    def on_phase_begin(self, phase: Phase) -> None:
        """Adds its line."""
        if self._progress is None:
            self._progress = _Progress(self._console, self._clock)
            self._progress.start()
        self._progress.figures = ""
        self._tasks[phase] = self._progress.add_task("  " * phase.depth + phase.name, total=phase.total, phase=phase)

    def on_progress(self, phase: Phase) -> None:
        """Moves its bar."""
        if self._progress is not None and phase in self._tasks:
            self._progress.figures = phase.figures
            self._progress.update(self._tasks[phase], completed=phase.done, total=phase.total)

    def on_phase_end(self, phase: Phase) -> None:
        """Leaves the bar of a stage on the screen, and a line of another phase that has lasted a while."""
        if self._progress is None:
            return
        task = self._tasks.pop(phase)
        if phase.total is not None and not phase.depth:
            self._progress.stop_task(task)
            return
        self._progress.remove_task(task)
        if ended := ended_line(phase):
            self._console.print(Text(ended))

    def on_close(self) -> None:
        """Stops the bars."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Progress(Progress):
    """Lines with bars, and one below with the figures, which do not fit beside them in 80 columns."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self.figures = ""
        super().__init__(
            _OnlyWithoutTotal(),
            _Name(),
            _OnlyWithTotal(bar_width=None),
            _Done(table_column=Column(no_wrap=True)),
            _Times(clock),
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


class _Name(ProgressColumn):
    def render(self, task: Task) -> RenderableType:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _OnlyWithTotal(BarColumn):
    def render(self, task: Task) -> RenderableType:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Text("") if task.total is None else super().render(task)


class _Done(ProgressColumn):
    def render(self, task: Task) -> RenderableType:
        return Text("" if task.total is None else done_of(task.fields["phase"]))


class _Times(ProgressColumn):
    """How long so far, and how long it will take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> RenderableType:
        phase: Phase = task.fields["phase"]
        eta = None if phase.seconds is not None or phase.done == phase.total else phase.eta_seconds
        left = "" if eta is None else f", {duration(eta)} left"
        seconds = self._clock() - phase.began if phase.seconds is None else phase.seconds
        return Text(f"{duration(math.floor(seconds))}{left}")


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
    rounded = math.ceil(seconds)
    days, rest = divmod(rounded, 86400)
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
