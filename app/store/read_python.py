"""Parses Python that constructs an experiment, without executing it: only constructor calls and literals."""

from __future__ import annotations

import ast
import re
from typing import Any

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.codegen import Reader, brief
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import Problem, SpecError

HINT = "the app parses plain constructor calls only; `nnxdsl show FILE --python` prints any experiment in this form"
DEEPEST_BRACKETS = 60


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
    the closing `if __name__ == "__main__":` (ignored). Nothing is executed or imported.

    Raises:
        SpecError: unsupported syntax, with line and column; or the problems of the experiment.
    """
    if _brackets(text) > DEEPEST_BRACKETS:
        raise SpecError([Problem("", "is nested too deeply")])
    reader = _Reader()
    try:
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                reader.names[node.targets[0].id] = reader.value(node.value)
            elif not (_is_docstring(node) or _is_import(node) or _is_main(node)):
                raise reader.refused(node, f"{brief(node)} is not understood")
    except SyntaxError as error:
        raise SpecError([Problem(f"line {error.lineno}", f"is no Python: {error.msg}")]) from error
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise SpecError([Problem("", f"is no Python: {error}")]) from error
    found = reader.names.get("experiment")
    if not isinstance(found, Experiment):
        wrong = "there is no `experiment = Experiment(...)`"
        raise SpecError([Problem("", wrong if found is None else f"{wrong}: it is {type(found).__name__}")])
    return found


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in ("nnxdsl", "__future__") and not node.level
    return isinstance(node, ast.Import) and [alias.name for alias in node.names] == ["nnxdsl"]


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" and not node.orelse


def _brackets(text: str) -> int:
    """Approximate nesting depth of brackets, to limit the parser's stack."""
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest
