"""Implementation of `run` and `resume`, in one or several processes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from nnxdsl.cli.exit_codes import FAILED, REFUSED
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError
from nnxdsl.runtime import distributed
from nnxdsl.runtime.compile_cache import compile_cache
from nnxdsl.runtime.distributed import DistributedArgs
from nnxdsl.runtime.limits import exhausted
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.evaluation import Sample
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Outcome, TrainingError

FIRST_ROWS = ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")


def run_command(
    experiment: Experiment,
    home: Path,
    *,
    quiet: bool,
    restart: bool,
    as_json: bool,
    distributed_args: DistributedArgs,
) -> int:
    """Run an experiment, print the outcome, and return the process's exit code.

    0: finished, or stopped through the run directory. 1: training failed. 130 and 143: stopped by SIGINT and SIGTERM,
    after saving a checkpoint. All processes of a run return the same code; only process 0 prints the outcome.
    """
    if not distributed.join(distributed_args):
        return _run(experiment, home, quiet=quiet, restart=restart, as_json=as_json)
    with distributed.on_peer_failure(lambda why: sys.stderr.write(f"ProcessError: {why}\n")):
        try:
            with distributed.Watch():
                is_process_0 = distributed.is_process_0()
                code = _run(
                    experiment, home, quiet=quiet or not is_process_0, restart=restart, as_json=as_json and is_process_0
                )
                if code == FAILED:
                    raise TrainingError("see the log")
        except BaseException as error:
            _exit_without_shutdown(error)
        distributed.shutdown()
        return code


def _exit_without_shutdown(error: BaseException) -> NoReturn:
    """Exit without jax's distributed shutdown, which would wait for all other processes."""
    if not isinstance(error, TrainingError):
        named = f"{type(error).__name__}: {error}" if isinstance(error, NnxdslError) else exhausted(error)
        what = named or traceback.format_exc()
        sys.stderr.write(f"{what.rstrip()}\n")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    distributed.wait_for_peers()
    os._exit(REFUSED if isinstance(error, NnxdslError) and not isinstance(error, TrainingError) else FAILED)


def _run(experiment: Experiment, home: Path, *, quiet: bool, restart: bool, as_json: bool) -> int:
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
    """Print the completions and the metrics of the first and the last evaluation."""
    _show_samples(outcome.samples, display)
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


def _show_samples(samples: dict[int, list[Sample]], display: Display) -> None:
    """Print policy and reference completions after the last step; without a reference, first and last ones."""
    if not samples:
        return
    first, last = min(samples), max(samples)
    for sample in samples[last]:
        if sample.reference is not None:
            display.side_by_side(sample.prompt, sample.policy, sample.reference)
    before = {sample.prompt: sample.policy for sample in samples[first]}
    rows = [
        {"prompt": prompt, f"step {first}": _visible(before.get(prompt, "")), f"step {last}": _visible(policy)}
        for prompt, policy, reference in samples[last]
        if reference is None
    ]
    display.final_table(rows)


def _visible(completion: str) -> str:
    """A completion, stripped; if it is only whitespace, its beginning with escapes."""
    escaped = repr(completion)[1:-1]
    return completion.strip() or (f"{escaped[:20]}..." if len(escaped) > 23 else escaped)


def _plain(outcome: Outcome) -> dict[str, Any]:
    last = outcome.samples[max(outcome.samples)] if outcome.samples else []
    return {
        "directory": str(outcome.directory),
        "state": outcome.state,
        "step": outcome.step,
        "evaluations": {str(step): metrics for step, metrics in outcome.evaluations.items()},
        "samples": [sample._asdict() for sample in last],
    }
