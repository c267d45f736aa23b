"""The display: readable at 80 columns, no markup interpreted, nothing on stdout."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from nnxdsl import Data, Experiment, Model, Objective, Sweep, product
from nnxdsl.launch.driver import TaskResult
from nnxdsl.sweep.sweep import Points
from nnxdsl.terminal import display as display_module
from nnxdsl.terminal.display import Display, clean, duration, number, thousands
from nnxdsl.terminal.events import Listener, Phase
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SMALL = {
    "name": "tiny",
    "model": Model.Gemma3("tiny"),
    "objective": Objective.SFT(loss_on="all"),
    "data": Data.Text("none.jsonl", max_length=16),
    "batch_size": 2,
    "steps": 4,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=False, highlight=False)


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    console, clock = plain(), Clock()
    with Display(console=console, every_seconds=10, clock=clock) as display:
        display.stage("reading data")
        display.stage("training", 100)
        for step in range(1, 101):
            clock.now += 30 if step == 1 else 1
            display.step(step, 100, {"loss": 0.693147, "rewards/accuracies": 0.5}, {"tokens/s": 12345.6})
    lines = written(console).splitlines()
    assert lines[:4] == [
        "reading data ...",
        "training: 100 steps",
        "step 1/100  loss 0.6931  accuracies 0.5  12.3k tokens/s",
        "step 11/100  loss 0.6931  accuracies 0.5  12.3k tokens/s  1:29 left",
    ]
    assert len(lines) == 2 + 11 + 1
    assert lines[-2:] == [
        "step 100/100  loss 0.6931  accuracies 0.5  12.3k tokens/s",
        "training: 100 steps in 2:09",
    ]


def test_a_sweep_without_a_terminal_says_how_many_runs_have_ended() -> None:
    console, clock = plain(), Clock()
    sweep = Sweep(Experiment(**SMALL), product({"seed": range(3)}))
    with Display(console=console, every_seconds=10, clock=clock) as display:
        display.stage("sweep tiny", len(sweep), unit="runs")
        points = Points(sweep, display)
        while (task := points.next()) is not None:
            clock.now += 12
            points.on_end(task, TaskResult("finished", 4))
    assert written(console).splitlines()[-2:] == ["sweep tiny 3/3", "sweep tiny: 3 runs in 0:36"]


def test_the_time_left_is_that_of_the_last_steps_without_the_compilation() -> None:
    clock = Clock()
    display = Display(quiet=True, clock=clock)
    display.stage("training", 1000)
    assert display.eta_seconds is None
    clock.now = 60
    display.step(501, 1000, {}, {})  # a resumed run: the steps before are none of this process
    assert display.eta_seconds is None
    clock.now = 62
    display.step(502, 1000, {}, {})
    assert display.eta_seconds == 498 * 2
    clock.now = 63
    display.step(504, 1000, {}, {})
    assert display.eta_seconds == 496 * 1
    for step in range(505, 905):  # only the last 200 count
        clock.now += 0.5
        display.step(step, 1000, {}, {})
    assert display.eta_seconds == pytest.approx(96 * 0.5, rel=1e-9)
    display.stage("again", 10)
    assert display.eta_seconds is None


def test_on_a_terminal_there_is_a_bar_with_the_figures_below() -> None:
    console, clock = terminal(), Clock()
    display = Display(console=console, clock=clock)
    display.stage("reading data")
    display.stage("training", 2000)
    for step in (1, 2, 3):
        clock.now += 2
        display.step(step, 2000, {"loss": 0.5, "rewards/margins": float("nan")}, {"tokens/s": 999.9, "samples/s": 2.0})
    display.say("step 3: [bold]saved[/bold] [/nope]")
    wait_until(lambda: "3/2000" in written(console))  # a bar is drawn four times a second
    display.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written(console)).replace("\r", "\n")
    assert "reading data" in text
    lines = text.splitlines()
    assert "step 3: [bold]saved[/bold] [/nope]" in lines
    bar, figures = next((a, b) for a, b in itertools.pairwise(lines) if "3/2000" in a)
    assert re.fullmatch(r" *training +3/2000 +0:06, 1:06:34 left *", bar)
    assert figures.rstrip() == "loss 0.5  margins nan  1k tokens/s  2 samples/s"
    assert max(map(len, lines)) <= 80


def test_quiet_shows_nothing() -> None:
    for console in (plain(), terminal()):
        with Display(quiet=True, console=console) as display:
            display.stage("training", 3)
            display.step(1, 3, {"loss": 1.0}, {"tokens/s": 1.0})
            display.say("hello")
            display.side_by_side("a", "b", "c")
            display.final_table([{"a": 1}])
        assert written(console) == ""


def test_two_answers_stand_side_by_side_in_eighty_columns() -> None:
    console = plain()
    Display(console=console).side_by_side(
        "How do I keep bread fresh [in summer]?",
        "Keep it in a paper bag inside a box. Freeze what you will not eat within two days.\n\nThen toast it.",
        "bread bread [red]bread[/red] " + "x" * 50,
    )
    lines = written(console).splitlines()
    assert {len(line) for line in lines} == {80}
    assert [line.rstrip() for line in lines] == [
        " How do I keep bread fresh [in summer]?",
        "",
        " policy                                   reference",
        " " + "─" * 78,
        " Keep it in a paper bag inside a box.     bread bread [red]bread[/red]",
        " Freeze what you will not eat within      " + "x" * 37,
        " two days.                                " + "x" * 13,
        "",
        " Then toast it.",
        "",
    ]


def test_nothing_that_a_model_writes_reaches_the_terminal_as_a_command() -> None:
    console = plain()
    display = Display(console=console)
    display.side_by_side("\x1b]0;title\x07", "a\tb\r\nc\x00\x9b2J", "\u202eright\ud800")
    display.say("\x1b[2J\N{FAMILY}ü")
    text = written(console)
    assert "\x1b" not in text
    for shown in (r"\x1b]0;title\x07", "a    b", r"c\x00\x9b2J", r"\u202eright\ud800", r"\x1b[2J" + "\N{FAMILY}ü"):
        assert shown in text


def test_the_table_at_the_end() -> None:
    console = plain()
    Display(console=console).final_table(
        [
            {"step": 0, "eval/loss": 0.6931471, "note": "[i]start[/i]"},
            {"step": 200, "eval/loss": 0.31, "rewards/accuracies": 1.0},
        ],
        title="dpo-tiny [x]",
    )
    assert [line.rstrip() for line in written(console).splitlines()] == [
        "dpo-tiny [x]",
        "",
        "  step   eval/loss   note           rewards/accuracies",
        " " + "─" * 54,
        "     0      0.6931   [i]start[/i]",
        "   200        0.31                                   1",
        "",
    ]


def test_a_long_line_is_one_record_outside_a_terminal() -> None:
    console = plain()
    Display(console=console).say("word " * 40 + "end")
    assert written(console) == "word " * 40 + "end\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.2, "0:01"), (59.5, "1:00"), (725, "12:05"), (11045, "3:04:05"), (183840, "2d 03:04")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers() -> None:
    assert [thousands(v) for v in (0.5, 12, 999.4, 999.6, 12345, 1.2e6, 5e9)] == [
        "0.5", "12", "999", "1k", "12.3k", "1.2M", "5G",
    ]  # fmt: skip
    assert thousands(float("inf")) == "inf"
    assert [number(v) for v in (0.693147, 1.5e-6, 3, float("nan"))] == ["0.6931", "1.5e-06", "3", "nan"]
    assert clean("ok\n") == "ok\n"


def test_stdout_stays_free() -> None:
    code = """
from nnxdsl.terminal import display as display_module
from nnxdsl.terminal.display import Display

with Display() as display:
    display.stage("training", 1)
    display.step(1, 1, {"loss": 1.0}, {})
    display.say("grün")
    display.side_by_side("a", "b", "c")
    display.final_table([{"step": 1}])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:backslashreplace"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == ""
    assert r"gr\xfcn" in done.stderr
    assert "step 1/1  loss 1" in done.stderr


def test_listeners_receive_phases_metrics_and_messages_even_if_nothing_is_printed() -> None:
    heard: list[object] = []

    class Heard(Listener):
        def on_phase_begin(self, phase: Phase) -> None:
            heard.append(("begin", phase.name, phase.total, phase.unit, phase.depth))

        def on_progress(self, phase: Phase) -> None:
            heard.append(("progress", phase.name, phase.done, phase.figures, phase.eta_seconds))

        def on_phase_end(self, phase: Phase) -> None:
            heard.append(("end", phase.name, phase.done, phase.seconds))

        def on_metrics(self, row: Mapping[str, object]) -> None:
            heard.append(row)

        def on_message(self, text: str) -> None:
            heard.append(text)

        def on_close(self) -> None:
            heard.append("close")

    clock = Clock()
    with Display(quiet=True, clock=clock, listeners=[Heard()]) as display:
        display.stage("training \x1b", 10)
        with display.phase("reading", 8, unit="bytes") as advance:
            clock.now = 2
            advance(2)
            display.begin("reading more")  # ends with the phase around it
        display.step(1, 10, {"eval/loss": 0.5}, {"tokens/s": 1000.0})
        display.metrics({"step": 0, "loss": 0.5})
        display.say("saved \x1b")
    assert heard == [
        ("begin", "training \\x1b", 10, "steps", 0),
        ("begin", "reading", 8, "bytes", 1),
        ("progress", "reading", 2, "", 6.0),
        ("begin", "reading more", None, "steps", 2),
        ("end", "reading more", 0, 0.0),
        ("end", "reading", 2, 2.0),
        ("progress", "training \\x1b", 1, "loss 0.5  1k tokens/s", None),
        {"step": 0, "loss": 0.5},
        "saved \\x1b",
        ("end", "training \\x1b", 1, 2.0),
        "close",
    ]


def test_phases_within_a_stage_have_bars_of_their_own_and_leave_a_line_if_they_were_long() -> None:
    console, clock = terminal(), Clock()
    display = Display(console=console, clock=clock)
    display.stage("starting")
    for name, seconds in (("reading weights", 4), ("reading little", 2)):
        with display.phase(name, 2**31, unit="bytes") as advance:
            clock.now += seconds
            advance(2**31)
    display.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written(console)).replace("\r", "\n").splitlines()
    assert [line for line in lines if " in " in line] == ["reading weights: 2 GiB in 0:04"]
    assert any(re.fullmatch(r" +reading weights +0/2 GiB 0:00 *", line) for line in lines)


def test_without_a_terminal_a_long_phase_has_a_line_at_its_begin_and_one_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(display_module, "LONG_SECONDS", 0.05)
    console, clock = plain(), Clock()
    with Display(console=console, clock=clock) as display:
        with display.phase("first"):
            pass  # a stage: its begin is always written
        display.stage("training", 4)
        with display.phase("short"):
            pass
        with display.phase("saving", 10, unit="arrays"), display.phase("waiting"):
            clock.now += 0.2
            wait_until(lambda: "waiting ..." in written(console))
    assert written(console).splitlines() == [
        "first ...",
        "training: 4 steps",
        "saving: 10 arrays",
        "waiting ...",
        "waiting: 0:01",
        "saving: 0/10 arrays in 0:01",
        "training: 0/4 steps in 0:01",
    ]
