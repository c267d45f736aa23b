"""Resume a run; only mesh, batching, memory, evaluation, checkpoint, tracking and notes may change."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nnxdsl.cli.arguments import add_allow, add_home, add_overrides
from nnxdsl.cli.load import load_json, override, run_directory
from nnxdsl.cli.verbs.run import add_training, train
from nnxdsl.config.core.serialization import diff, from_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import Problem, RunError, SpecError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runtime.limits import require_address_space


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_home(parser)
    add_allow(parser)
    parser.add_argument("directory", metavar="RUN", help="run directory or run id")
    add_overrides(parser)
    add_training(parser)


def run(args: Namespace) -> int:
    """Resume training, from the directory in which the run was started."""
    require_address_space()
    directory = run_directory(args.directory, args.home)
    original = load_json(directory / "experiment.json")
    if directory.resolve().name != original.id:
        raise RunError(f"{directory} contains the run {original.id}; rename the directory to that id to resume it")
    experiment = _experiment(RunDirectory(directory), original, args.overrides)
    home = directory.parent.resolve()
    enter_start_directory(directory)
    return train(experiment, home, args)


def enter_start_directory(directory: Path) -> None:
    """Change to the directory in which a run was started, to which relative paths in its experiment refer."""
    if (started := RunDirectory(directory).working_directory()) is not None:
        os.chdir(started)


def _experiment(run: RunDirectory, original: Experiment, overrides: list[str]) -> Experiment:
    """The last attempt's experiment with overrides.

    Raises:
        SpecError: the overrides change the run id.
    """
    last = _last_attempted(run, original)
    experiment = override(last, overrides)
    if experiment.id != last.id:
        may = Experiment.outside_identity - {"name"}
        message = f"would make it another run than {last.id}; on a resume only {', '.join(sorted(may))} may change"
        wrong = [path for path in diff(last, experiment) if path.partition(".")[0] not in may]
        raise SpecError([Problem(path, message) for path in wrong], f"Experiment '{last.name}'")
    return experiment


def _last_attempted(run: RunDirectory, original: Experiment) -> Experiment:
    """The experiment of the last attempt, whose mesh or evaluation may differ; the original if there is no attempt.

    Raises:
        RunError: the last attempt has no experiment, or one of another run.
        SpecError: its experiment is invalid.
    """
    attempts = run.attempts()
    if not attempts:
        return original
    location = f"{run.path / 'attempts.jsonl'}: the last attempt"
    if "experiment" not in attempts[-1]:
        raise RunError(f"{location} has no experiment; remove its line")
    try:
        last = from_dict(attempts[-1]["experiment"], Experiment)
    except SpecError as error:
        raise SpecError(error.problems, location) from error
    if last.id != original.id:
        raise RunError(f"{location} is of the run {last.id} and not of {original.id}; remove its line")
    return last
