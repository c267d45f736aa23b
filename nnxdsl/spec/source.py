"""Specs as Python: generated code that builds an equal object, and the small literals of the command line read back.

Nothing here executes text: literals are read through a whitelist on the syntax tree.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

import attrs

from nnxdsl.spec.base import Spec, is_family, members_hint, registry
from nnxdsl.spec.errors import Problem, SpecError, suggest

WIDTH = 100


def to_python(spec: Spec, variable: str = "experiment") -> str:
    """A Python file that builds an object equal to `spec`; fields at their defaults are left out."""
    imports = sorted(set(_imports(spec)))
    ours = sorted(name for module, name in imports if module == "nnxdsl")
    others = [f"from {module} import {name}" for module, name in imports if module != "nnxdsl"]
    main = f'\n\nif __name__ == "__main__":\n    {variable}.main()\n' if hasattr(spec, "main") else "\n"
    header = [f"from nnxdsl import {', '.join(ours)}", *others]
    return "\n".join(header) + f"\n\n{variable} = {render(spec)}" + main


def render(value: object, indent: int = 0) -> str:
    """One value as Python source, wrapped where a line grows too long."""
    if not isinstance(value, Spec):
        return repr(value)
    parts = list(_arguments(value))
    flat = f"{value.__class__.__qualname__}({', '.join(f'{k}={render(v)}' if k else render(v) for k, v in parts)})"
    if "\n" not in flat and len(flat) + indent + 16 <= WIDTH and not hasattr(value, "main"):
        return flat
    pad = " " * (indent + 4)
    lines = [f"{pad}{f'{k}=' if k else ''}{render(v, indent + 4)},\n" for k, v in parts]
    return f"{value.__class__.__qualname__}(\n{''.join(lines)}{' ' * indent})"


def parse_value(text: str) -> object:
    """A command line's value: a Python literal, a constructor call such as `Objective.DPO(beta=0.2)`, else the text itself.

    Raises:
        SpecError: if it is a call, but of nothing known or with arguments that are not literals.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return text
    if isinstance(node, ast.Call):
        return _build(node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return text


def _build(node: ast.expr) -> object:
    if not isinstance(node, ast.Call):
        if isinstance(node, ast.Tuple):
            return tuple(_build(item) for item in node.elts)
        try:
            return ast.literal_eval(node)
        except ValueError:
            message = f"{ast.unparse(node)} is neither a literal nor a constructor call"
            raise SpecError([Problem("", message)]) from None
    called = ast.unparse(node.func)
    cls = registry.get(called)
    if cls is None or is_family(cls):
        hint = f"; use one of its members{members_hint(cls)}" if cls else suggest(called, registry)
        raise SpecError([Problem("", f"there is no '{called}'{hint}")])
    if any(keyword.arg is None for keyword in node.keywords):
        raise SpecError([Problem("", f"** is not understood in {called}(...)")])
    positional = [_build(argument) for argument in node.args]
    return cls(*positional, **{str(keyword.arg): _build(keyword.value) for keyword in node.keywords})


def _arguments(spec: Spec) -> Iterator[tuple[str, object]]:
    for field in attrs.fields(type(spec)):
        if not field.kw_only:
            yield "", getattr(spec, field.name)
    for field in attrs.fields(type(spec)):
        value = getattr(spec, field.name)
        if field.kw_only and not (field.default is not attrs.NOTHING and field.default == value):
            yield field.name, value


def _imports(value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Spec):
        builtin = value.__class__.__qualname__ in registry
        yield (
            ("nnxdsl", value.family.__name__)
            if builtin
            else (type(value).__module__, type(value).__qualname__.split(".")[0])
        )
        for _, child in _arguments(value):
            yield from _imports(child)
    elif isinstance(value, builtins.tuple):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _imports(item)
