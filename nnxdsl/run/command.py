"""What the command `run` does and prints; the words themselves are parsed in `nnxdsl/cli.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nnxdsl.run.attempt import Outcome, TrainingError
from nnxdsl.run.compile_cache import compile_cache
from nnxdsl.run.display import Display
from nnxdsl.run.loop import run
from nnxdsl.spec.experiment import Experiment

FAILED = 1
"""Exit code when training failed; what was saved last is whole."""

FIRST_ROWS = ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")


def run_command(experiment: Experiment, home: Path, *, quiet: bool, restart: bool, as_json: bool) -> int:
    """Run an experiment, show how it ended, and return the process's exit code.

    0: finished, or stopped on request through the run directory. 1: training failed. 130 and 143: stopped by SIGINT and
    SIGTERM, all saved.
    """
    display = Display(quiet=quiet)
    try:
        with display, compile_cache(home, display.say):
            outcome = run(experiment, home, display, restart=restart)
    except TrainingError as error:
        sys.stderr.write(f"TrainingError: {error}\n")
        return FAILED
    show_outcome(outcome, display)
    if as_json:
        json.dump({**_plain(outcome), "id": experiment.id}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    return 0 if outcome.signal is None else 128 + outcome.signal


def show_outcome(outcome: Outcome, display: Display) -> None:
    """The table at the end, and the answers side by side."""
    for sample in outcome.samples:
        if sample.reference is None:
            display.say(f"{sample.prompt}\n    {sample.policy}")
        else:
            display.side_by_side(sample.prompt, sample.policy, sample.reference)
    if outcome.evaluations:
        first, last = min(outcome.evaluations), max(outcome.evaluations)
        names = [f"eval/{name}" for name in FIRST_ROWS if f"eval/{name}" in outcome.evaluations[last]]
        names += sorted(set(outcome.evaluations[last]) - set(names))
        rows = [
            {
                "held out": name,
                **{f"step {step}": outcome.evaluations[step].get(name) for step in dict.fromkeys((first, last))},
            }
            for name in names
        ]
        display.final_table(rows)
    display.say(f"{outcome.state} at step {outcome.step}: {outcome.directory}")


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "directory": str(outcome.directory),
        "state": outcome.state,
        "step": outcome.step,
        "evaluations": {str(step): metrics for step, metrics in outcome.evaluations.items()},
        "samples": [sample._asdict() for sample in outcome.samples],
    }
