"""Parses Python that constructs an experiment, without executing it: only constructor calls and literals."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from nnxdsl.config.core.base import Spec, is_family, members_hint, registry
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import Problem, SpecError, nearest

HINT = "the app parses plain constructor calls only; `nnxdsl show FILE --python` prints any experiment in this form"
DEEPEST = 60
DEEPEST_BRACKETS = 60


def read_python(text: str) -> Experiment:
    """Parses the experiment of a Python text.

    Supported are a docstring, imports from nnxdsl, assignments of constructor calls, literals and earlier names, and
    the closing `if __name__ == "__main__":` (ignored). Nothing is executed or imported.

    Raises:
        SpecError: unsupported syntax, with line and column; or the problems of the experiment.
    """
    if _brackets(text) > DEEPEST_BRACKETS:
        raise SpecError([Problem("", "is nested too deeply")])
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise SpecError([Problem(f"line {error.lineno}", f"is no Python: {error.msg}")]) from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise SpecError([Problem("", f"is no Python: {error}")]) from error
    names: dict[str, object] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = _value(node.value, names, 0)
        elif not (_is_docstring(node) or _is_import(node) or _is_main(node)):
            raise _refused(node, f"{_what(node)} is not understood")
    found = names.get("experiment")
    if not isinstance(found, Experiment):
        wrong = "there is no `experiment = Experiment(...)`"
        raise SpecError([Problem("", wrong if found is None else f"{wrong}: it is {type(found).__name__}")])
    return found


def _value(node: ast.expr, names: Mapping[str, object], depth: int) -> object:
    if depth > DEEPEST:
        raise _refused(node, "is nested too deeply")
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand, names, depth + 1)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.Tuple | ast.List) and not any(isinstance(item, ast.Starred) for item in node.elts):
        items = [_value(item, names, depth + 1) for item in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Call):
        return _built(node, names, depth)
    raise _refused(node, f"{_what(node)} is neither a literal nor a constructor call")


def _built(node: ast.Call, names: Mapping[str, object], depth: int) -> Spec:
    called = ast.unparse(node.func).removeprefix("nnxdsl.")
    cls = registry.get(called)
    if cls is None:
        raise _refused(node, f"there is no {called[:60]!r}{nearest(called, registry)}")
    if is_family(cls) and not (cls.default_member and node.args):
        raise _refused(node, f"{called} is a family; use one of its members: {members_hint(cls)}")
    given = [keyword.arg for keyword in node.keywords]
    if None in given or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise _refused(node, "* and ** are not understood")
    positional = [_value(argument, names, depth + 1) for argument in node.args]
    keywords = {str(keyword.arg): _value(keyword.value, names, depth + 1) for keyword in node.keywords}
    try:
        return cls(*positional, **keywords)
    except TypeError as error:
        raise _refused(node, f"{called}: {error}") from error
    except SpecError as error:
        problems = [Problem(problem.path, f"{problem.message} (line {node.lineno})") for problem in error.problems]
        raise SpecError(problems, error.where or called) from error


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in ("nnxdsl", "__future__") and not node.level
    return isinstance(node, ast.Import) and [alias.name for alias in node.names] == ["nnxdsl"]


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" and not node.orelse


def _what(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refused(node: ast.expr | ast.stmt, message: str) -> SpecError:
    return SpecError([Problem(f"line {node.lineno}, column {node.col_offset + 1}", f"{message}; {HINT}")])


def _brackets(text: str) -> int:
    """Approximate nesting depth of brackets, to limit the parser's stack."""
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", text):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest
