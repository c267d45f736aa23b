"""Parses experiments that runs have stored or visitors have pasted, as JSON or Python, of which nothing is executed.

Classes of other packages are imported only if the app was started with `--allow` (`nnxdsl.allow_imports`).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.codegen import Reader, brief
from nnxdsl.config.core.imports import require_allowed
from nnxdsl.config.core.serialization import from_dict, from_json, to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.errors import NnxdslError, Problem, SpecError
from nnxdsl.storage.jsonl import read_json, write_json

LONGEST = 200_000  # maximum length of a pasted text, in characters
HINT = "the app parses plain constructor calls only; `nnxdsl show FILE --python` prints any experiment in this form"
DEEPEST_BRACKETS = 60


def from_text(text: str) -> Experiment:
    """Parses a pasted text, Python or JSON, without executing it; raises a `SpecError` with all problems."""
    if len(text) > LONGEST:
        raise SpecError([Problem("", f"{len(text):,} characters; expected at most {LONGEST:,}")])
    if not text.strip():
        raise SpecError([Problem("", "paste the Python that `nnxdsl show --python` prints, or JSON")])
    if text.lstrip().startswith("{"):
        return from_json(text, Experiment)
    experiment = read_python(text)
    require_allowed(experiment)
    return experiment


def from_tree(tree: Any) -> Experiment:
    """Parses an experiment from a JSON value; raises if it is none, or names code that is not allowed."""
    if not isinstance(tree, dict):
        raise SpecError([Problem("", f"expected a JSON object, got {type(tree).__name__}")])
    return from_dict(tree, Experiment)


def file_of(directory: Path, experiment: Experiment) -> Path:
    """Returns the path of an experiment's file in a directory, which is named after its content."""
    digest = hashlib.sha256(json.dumps(to_dict(experiment), sort_keys=True).encode()).hexdigest()[:16]
    return directory / f"{digest}.json"


def written(directory: Path, experiment: Experiment) -> Path:
    """Returns `file_of` an experiment, which is written unless it exists."""
    file = file_of(directory, experiment)
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(file, to_dict(experiment))
    return file


def stored(path: Path) -> Experiment | None:
    """Loads the experiment file of a run; None if it is damaged or names code that is not allowed."""
    try:
        return from_tree(read_json(path))
    except NnxdslError:
        return None


def facts_of(tree: Any) -> dict[str, str]:
    """Objective, model, mesh and adapter of an experiment's JSON, for the list of runs."""
    if not isinstance(tree, dict):
        return {}
    facts = {name: str(part.get("type")) for name in ("objective", "model") if isinstance(part := tree.get(name), dict)}
    model, mesh = tree.get("model"), tree.get("mesh")
    if isinstance(model, dict) and isinstance(model.get("size"), str):
        facts["model"] += f" {model['size']}"
    if isinstance(mesh, dict):
        sizes = [f"{name} {mesh[name]}" for name in MESH_AXES if isinstance(mesh.get(name), int) and mesh[name] > 1]
        facts["mesh"] = " x ".join(sizes) or "1 device"
    facts["adapter"] = str(tree["adapter"].get("type")) if isinstance(tree.get("adapter"), dict) else "all weights"
    return facts


def settings_of(tree: Any) -> dict[str, str]:
    """The settings of an experiment's JSON as texts by path; those of another experiment in it are left out."""
    settings: dict[str, str] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            if path and value.get("type") == "Experiment":
                return
            for name, one in value.items():
                add(f"{path}.{name}" if path else str(name), one)
        else:
            text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
            settings[sys.intern(path)] = sys.intern(text)

    add("", tree)
    return {path: text for path, text in settings.items() if path not in ("type", "name", "notes")}


class _Reader(Reader):
    """Names the place of what it does not understand."""

    def construct(self, node: ast.Call, cls: type[Spec], positional: list[object], named: dict[str, object]) -> Spec:
        """Adds the line to the problems of an object."""
        try:
            return cls(*positional, **named)
        except TypeError as error:
            raise self.refused(node, f"{cls.__qualname__}: {error}") from error
        except SpecError as error:
            problems = [Problem(problem.path, f"{problem.message} (line {node.lineno})") for problem in error.problems]
            raise SpecError(problems, error.where or cls.__qualname__) from error

    def refused(self, node: Any, message: str) -> SpecError:
        """Adds line and column, and what is understood."""
        return SpecError([Problem(f"line {node.lineno}, column {node.col_offset + 1}", f"{message}; {HINT}")])


def read_python(text: str) -> Experiment:
    """Parses the experiment of a Python text.

    Supported are a docstring, imports from nnxdsl, assignments of constructor calls, literals and earlier names, and
    the closing `if __name__ == "__main__":` (ignored). Nothing is executed or imported. A `SpecError` has line and
    column of unsupported syntax, or the problems of the experiment.
    """
    if _brackets(text) > DEEPEST_BRACKETS:
        raise SpecError([Problem("", "is nested too deeply")])
    reader = _Reader()
    try:
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                reader.names[node.targets[0].id] = reader.value(node.value)
            elif not _is_ignored(node):
                raise reader.refused(node, f"{brief(node)} is not understood")
    except SyntaxError as error:
        raise SpecError([Problem(f"line {error.lineno}", f"is no Python: {error.msg}")]) from error
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise SpecError([Problem("", f"is no Python: {error}")]) from error
    value = reader.names.get("experiment")
    if not isinstance(value, Experiment):
        wrong = "there is no `experiment = Experiment(...)`"
        raise SpecError([Problem("", wrong if value is None else f"{wrong}: it is {type(value).__name__}")])
    return value


def _is_ignored(node: ast.stmt) -> bool:
    """Whether it is a docstring, an import of nnxdsl, or the closing `if __name__ == "__main__":`."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())) | ast.ImportFrom(module="nnxdsl" | "__future__", level=0):
            return True
        case ast.Import(names=[ast.alias(name="nnxdsl")]):
            return True
        case ast.If(orelse=[]):
            return ast.unparse(node.test) == "__name__ == '__main__'"
    return False


def _brackets(text: str) -> int:
    """Approximate nesting depth of brackets, to limit the parser's stack."""
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest
