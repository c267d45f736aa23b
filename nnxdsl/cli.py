"""The command line: words to objects to one of a few verbs. Loads jax only for the verbs that compute."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnxdsl.run.store import RunDirectory, list_runs
from nnxdsl.spec.errors import NnxdslError, Problem, RunError, SpecError, suggest
from nnxdsl.spec.experiment import Experiment
from nnxdsl.spec.source import parse_value, render, to_python
from nnxdsl.spec.tree import diff, evolve, flatten, from_json, get, to_json

VERBS = ("run", "show", "plan", "diff", "runs", "resume")
REFUSED = 2
"""Exit code when something was refused; the message says what."""


def main(argv: Sequence[str] | None = None) -> int:
    """`nnxdsl VERB FILE-or-RUN [path=value ...]`."""
    parser = _parser("nnxdsl", "run, resume and inspect post-training experiments")
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("words", nargs="*", metavar="FILE-or-RUN [OTHER] [path=value ...]")
    options = parser.parse_intermixed_args(argv)
    return _guarded(lambda: _dispatch(options, list(options.words)))


def main_of(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """`python FILE [run|show|plan|diff OTHER] [path=value ...]`."""
    parser = _parser(None, f"the experiment '{experiment.name}'")
    parser.add_argument("words", nargs="*", metavar="[run|show|plan|diff OTHER] [path=value ...]")
    options = parser.parse_intermixed_args(argv)
    words = list(options.words)
    options.verb = words.pop(0) if words and "=" not in words[0] else "run"
    return _guarded(lambda: _dispatch(options, words, experiment))


def _parser(prog: str | None, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"Config-as-code post-training: {description}.",
        epilog="verbs: run (the default) trains, or goes on where the run stands; show prints every path and value; plan "
        "says steps, parameters, memory and shardings; diff compares with another file or run; runs lists runs; resume "
        "goes on with a run directory. Values are Python literals or objects such as \"Objective.DPO(beta=0.2)\"; "
        "anything else is text.",
    )
    parser.add_argument("--home", type=Path, default=Path("runs"), help="directory of all runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print for machines, on standard output")
    parser.add_argument("--python", action="store_true", help="show: print a Python file that builds the experiment")
    parser.add_argument("--quiet", action="store_true", help="run, resume: no progress")
    parser.add_argument("--restart", action="store_true", help="run: move what the run's directory holds away and begin again")
    return parser


def _guarded(command: Any) -> int:
    try:
        return command()
    except NnxdslError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return REFUSED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(options: argparse.Namespace, words: list[str], experiment: Experiment | None = None) -> int:
    verb, home = options.verb, options.home
    _refuse_idle_flags(options)
    if verb not in VERBS:
        raise SpecError([Problem(verb, f"is neither a verb nor path=value{suggest(verb, VERBS)}")])
    if verb == "runs":
        if words:
            raise SpecError([Problem(words[0], "runs takes no argument but --home")])
        return _runs(home, as_json=options.json)
    if experiment is None or verb == "resume":
        if not words or "=" in words[0]:
            raise SpecError([Problem("", f"{verb} needs a file or a run")])
        target = words.pop(0)
        if verb == "resume":
            return _resume(options, target, words)
        experiment = load(target, home)
    if verb == "diff":
        if not words or "=" in words[0]:
            raise SpecError([Problem("", "diff needs another file or run to compare with")])
        other = load(words.pop(0), home)
        return _diff(override(experiment, words), other, as_json=options.json)
    changed = override(experiment, words)
    if verb == "show":
        return _show(experiment, changed, options)
    command = importlib.import_module("nnxdsl.run.command")
    if verb == "plan":
        return command.plan_command(changed, as_json=options.json)
    return command.run_command(changed, home, quiet=options.quiet, restart=options.restart, as_json=options.json)


def _refuse_idle_flags(options: argparse.Namespace) -> None:
    serves = {"python": ("show",), "quiet": ("run", "resume"), "restart": ("run",)}
    idle = [flag for flag, verbs in serves.items() if getattr(options, flag) and options.verb not in verbs]
    if idle:
        raise SpecError([Problem(f"--{flag}", f"has no effect on {options.verb}") for flag in idle])


def override(experiment: Experiment, words: Sequence[str]) -> Experiment:
    """The experiment with `path=value` words applied.

    Raises:
        SpecError: with every problem of all words together.
    """
    changes: dict[str, object] = {}
    problems: list[Problem] = []
    for word in words:
        path, equals, text = word.partition("=")
        if not equals:
            problems.append(Problem(word, "expected path=value"))
            continue
        try:
            changes[path] = parse_value(text)
        except SpecError as error:
            problems += [problem.under(path) for problem in error.problems]
    if problems:
        raise SpecError(problems, f"Experiment '{experiment.name}'")
    return evolve(experiment, changes) if changes else experiment


def load(target: str, home: Path) -> Experiment:
    """The experiment of a Python file, a JSON file, a run directory or a run's id.

    Raises:
        RunError: there is no such thing, or the file has no `experiment`.
    """
    path = Path(target)
    if path.suffix == ".py" and path.is_file():
        return _load_python(path)
    if path.suffix == ".json" and path.is_file():
        return from_json(path.read_text(encoding="utf-8"), Experiment)
    directory = run_directory(target, home)
    return from_json((directory / "experiment.json").read_text(encoding="utf-8"), Experiment)


def run_directory(target: str, home: Path) -> Path:
    """The run directory that a path or an id means."""
    for candidate in (Path(target), home / target):
        if (candidate / "experiment.json").is_file():
            return candidate
    known = suggest(target, [run.id for run in list_runs(home)][:20])
    raise RunError(f"{target}: no such file or run (in {home}, relative to {Path.cwd()}){known}")


def _load_python(path: Path) -> Experiment:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # so that recipes can import their neighbours, as when run directly
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found: object = getattr(module, "experiment", None)
    if not isinstance(found, Experiment):
        raise RunError(f"{path}: has no Experiment named 'experiment'")
    return found


def _show(original: Experiment, changed: Experiment, options: argparse.Namespace) -> int:
    if options.json:
        sys.stdout.write(to_json(changed))
    elif options.python:
        sys.stdout.write(to_python(changed))
    else:
        before = flatten(original)
        for path, value in flatten(changed).items():
            mark = "" if path in before and before[path] == value else f"    # {_was(before, path)}"
            sys.stdout.write(f"{path} = {render(value)}{mark}\n")
        sys.stdout.write(f"# id: {changed.id}\n")
    return 0


def _was(before: dict[str, object], path: str) -> str:
    return f"in the file: {render(before[path])}" if path in before else "not in the file"


def _diff(left: Experiment, right: Experiment, *, as_json: bool) -> int:
    changes = {path: (get(left, path), value) for path, value in diff(left, right).items()}
    if as_json:
        plain = {path: {"left": render(old), "right": render(new)} for path, (old, new) in changes.items()}
        sys.stdout.write(json.dumps({"same_run": left.id == right.id, "changes": plain}, indent=2) + "\n")
        return 0
    for path, (old, new) in changes.items():
        sys.stdout.write(f"{path}: {render(old)} -> {render(new)}\n")
    verdict = "the same run" if left.id == right.id else f"different runs: {left.id}, {right.id}"
    sys.stdout.write(f"# {len(changes)} differences; {verdict}\n")
    return 0


def _runs(home: Path, *, as_json: bool) -> int:
    found = list_runs(home)
    if as_json:
        rows = [
            {"id": r.id, "state": r.state, "step": r.step, "total": r.total, "created": r.created, "problem": r.problem}
            for r in found
        ]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    if not found:
        sys.stdout.write(f"no runs in {home}\n")
    for run in found:
        progress = f"{run.step}/{run.total}" if run.total else "-"
        sys.stdout.write(f"{run.id:<40} {run.state or 'damaged':<10} {progress:>12}  {run.created or ''} {run.problem or ''}".rstrip() + "\n")
    return 0


def _resume(options: argparse.Namespace, target: str, words: list[str]) -> int:
    directory = run_directory(target, options.home)
    asked = from_json((directory / "experiment.json").read_text(encoding="utf-8"), Experiment)
    changed = override(asked, words)
    if changed.id != asked.id:
        changes = ", ".join(diff(asked, changed))
        message = f"changes what {asked.id} computes ({changes}); only placement and cadence may change on a resume"
        raise SpecError([Problem("", message)], f"Experiment '{asked.name}'")
    attempts = RunDirectory(directory).attempts()
    started = Path(str(attempts[-1].get("cwd", "."))) if attempts else Path()
    home = directory.parent.resolve()
    if started.is_dir():
        os.chdir(started)  # relative paths in the experiment mean what they meant when it was started
    command = importlib.import_module("nnxdsl.run.command")
    return command.run_command(changed, home, quiet=options.quiet, restart=False, as_json=options.json)
