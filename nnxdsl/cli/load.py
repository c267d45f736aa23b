"""Load experiments from files, runs or ids, and apply `path=value` overrides. Does not import jax."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.codegen import parse_value
from nnxdsl.config.core.imports import allow_imports, allow_names_in, names_in
from nnxdsl.config.core.serialization import evolve, from_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, Problem, RunError, SpecError, nearest
from nnxdsl.runs.run_list import list_runs

SpecT = TypeVar("SpecT", bound=Spec)


def override(spec: SpecT, overrides: Sequence[str]) -> SpecT:
    """Apply `path=value` overrides to an experiment, or to a part of one.

    Raises:
        SpecError: lists the problems of all arguments.
    """
    changes: dict[str, object] = {}
    problems: list[Problem] = []
    for word in overrides:
        path, equals, text = word.partition("=")
        if not equals or not path:
            problems.append(Problem(word, "expected path=value, without spaces around '='"))
        elif path in changes:
            problems.append(Problem(path, "is set twice"))
        else:
            try:
                changes[path] = parse_value(text)
            except SpecError as error:
                changes[path] = None
                problems += [problem.under(path) for problem in error.problems]
    if problems:
        name = f"Experiment '{spec.name}'" if isinstance(spec, Experiment) else type(spec).__qualname__
        raise SpecError(problems, name)
    if not changes:
        return spec
    changed = evolve(spec, changes)
    before = {name for _, name in names_in(spec)}
    allow_imports(*(name for _, name in names_in(changed) if name not in before))  # trusted: typed by the user
    return changed


def load(target: str, home: Path) -> Experiment:
    """Load the experiment of a Python file, a JSON file, a run directory or a run id.

    Raises:
        RunError: the file or run does not exist, or the file has no `experiment`.
        SpecError: the content is not a valid experiment.
    """
    path = Path(target)
    if path.suffix == ".py" and path.is_file():
        return _load_python(path)
    if path.is_file():
        return load_json(path)
    return load_json(run_directory(target, home) / "experiment.json")


def run_directory(target: str, home: Path) -> Path:
    """Find a run directory by its path or id.

    Raises:
        RunError: no such run; names the directories that were searched and a similar id.
    """
    for candidate in (Path(target), home / target):
        if (candidate / "experiment.json").is_file():
            return candidate
    if Path(target).is_file():
        raise RunError(f"{target}: is a file; name a run, or run the file again to resume its run")
    if Path(target).is_dir():
        raise RunError(f"{target}: is not a run directory: it has no experiment.json")
    hint = nearest(target, [run.id for run in list_runs(home)])
    raise RunError(f"{target}: no such file or run (relative to {Path.cwd()}; runs are searched in {home}){hint}")


def load_json(path: Path) -> Experiment:
    """Load the experiment of a JSON file.

    Raises:
        RunError: the file cannot be read.
        SpecError: the content is not a valid experiment.
    """
    try:
        return from_json(path.read_text(encoding="utf-8"), Experiment)
    except SpecError as error:
        raise SpecError(error.problems, str(path)) from error
    except (OSError, UnicodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def _load_python(path: Path) -> Experiment:
    return experiment_in(load_module(path), path)


def experiment_in(module: ModuleType, path: Path) -> Experiment:
    """The `experiment` of a module returned by `load_module`.

    Raises:
        RunError: the module has none.
    """
    experiment = vars(module).get("experiment")
    if not isinstance(experiment, Experiment):
        raise RunError(f"{path}: has no Experiment named 'experiment'")
    allow_names_in(experiment)
    return experiment


def load_module(path: Path) -> ModuleType:
    """Import a user's Python file. What stands beside it can be imported from then on, also by child processes.

    Raises:
        RunError: executing it fails; names the line.
        NnxdslError: it builds an invalid object.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    place = str(path.parent.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)  # as when the file is run directly
    try:
        spec.loader.exec_module(module)
    except NnxdslError:
        raise
    except SystemExit as error:
        message = 'exits when it is imported; put experiment.main() under `if __name__ == "__main__":`'
        raise RunError(f"{path}: {message}") from error
    except Exception as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise RunError(f"{_line_of(error, path)}: {type(error).__name__}: {what}") from error
    return module


def _line_of(error: Exception, path: Path) -> str:
    """`file:line` of an error in a user's file, or of a syntax error in a module that it imports."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((str(error.filename), error.lineno))
        file, line = places[-1]
        return f"{path if Path(file) == path.resolve() else file}:{line}"
    lines = [line for file, line in places if Path(file) == path.resolve()]
    return f"{path}:{lines[-1]}" if lines else str(path)
