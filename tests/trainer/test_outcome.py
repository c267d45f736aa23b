"""The printed outcome of a run: completions and held-out metrics, before and after training."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from nnxdsl.cli.run import show_outcome
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.evaluation import Sample
from nnxdsl.trainer.trainer import Outcome

METRICS = {0: {"eval/loss": 6.3}, 5: {"eval/loss": 1.0}, 9: {"eval/loss": 0.5}}


def shown(samples: dict[int, list[Sample]], metrics: dict[int, dict[str, float]]) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    show_outcome(Outcome(Path("runs/a"), "finished", 9, None, metrics, samples), Display(console=console))
    assert isinstance(console.file, io.StringIO)
    return [line.strip() for line in console.file.getvalue().splitlines() if set(line) - set(" ─")]


def test_without_a_reference_answers_stand_beside_those_before_training() -> None:
    samples = {
        0: [Sample("2 and 2?", "\n" * 40, None), Sample("Hi", "\n\t", None)],
        5: [Sample("2 and 2?", "3", None), Sample("Hi", "H", None)],
        9: [Sample("2 and 2?", " 4\n", None), Sample("Hi", "Hello", None)],
    }
    assert shown(samples, METRICS) == [
        "prompt     step 0                    step 9",
        r"2 and 2?   \n\n\n\n\n\n\n\n\n\n...   4",
        r"Hi         \n\t                      Hello",
        "held out    step 0   step 9",
        "eval/loss      6.3      0.5",
        "finished at step 9: runs/a",
    ]


def test_with_a_reference_answers_stand_beside_its_own() -> None:
    samples = {0: [Sample("Hi", "a", "a")], 9: [Sample("Hi", "b", "a")]}
    lines = shown(samples, {})
    assert [line.split() for line in lines] == [
        ["Hi"],
        ["policy", "reference"],
        ["b", "a"],
        ["finished", "at", "step", "9:", "runs/a"],
    ]


def test_a_run_without_evaluations_shows_where_it_is() -> None:
    assert shown({}, {}) == ["finished at step 9: runs/a"]
