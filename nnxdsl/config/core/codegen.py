"""Specs as Python: generated code that builds an equal object, and the small literals of the command line read back.

Nothing here executes text: literals are read through a whitelist on the syntax tree. Generated code is laid out as
`ruff format --line-length 100` leaves it.
"""

from __future__ import annotations

import ast
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import cast

import attrs

from nnxdsl.config.core.base import (
    Spec,
    declared,
    is_builtin,
    is_family,
    members,
    members_hint,
    registry,
    require_importable,
)
from nnxdsl.errors import Problem, SpecError, nearest

WIDTH = 100
LONGEST_LITERAL = 10_000
"""Characters; longer values of the command line are text, whatever they look like."""

Names = Mapping[type[Spec], str]


def to_python(spec: Spec, variable: str = "experiment") -> str:
    """A Python file that builds an object equal to `spec`; fields at their defaults are left out.

    Raises:
        SpecError: if a class in it could not be imported by that file.
    """
    imports, names = _imports(spec, variable)
    opening = f"{variable} = "
    built = _layout(spec, names, indent=0, before=len(opening), after=0, explode=hasattr(spec, "main"))
    main = f'\nif __name__ == "__main__":\n    {variable}.main()\n' if hasattr(spec, "main") else ""
    return f"{imports}\n{opening}{built}\n{main}"


def render(value: object, names: Names | None = None) -> str:
    """One value as Python source in one line; `names` has the names of classes that are not called by their own."""
    if isinstance(value, Spec):
        called = (names or {}).get(type(value), type(value).__qualname__)
        return f"{called}({', '.join(name + render(item, names) for name, item in _arguments(value))})"
    if isinstance(value, tuple):
        items = [render(item, names) for item in cast("tuple[object, ...]", value)]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{_quoted(name)}: {render(item)}" for name, item in pairs) + "}"
    if isinstance(value, list):
        return f"[{', '.join(render(item) for item in cast('list[object]', value))}]"
    if isinstance(value, float):
        return repr(value).replace("e+", "e")
    return _quoted(value) if isinstance(value, str) else repr(value)


def parse_value(text: str) -> object:
    """A value of the command line: a literal, a constructor call such as `Objective.DPO(beta=0.2)`, else the text.

    Raises:
        SpecError: if it is a call, but of nothing known or with arguments that are not literals.
    """
    if len(text) > LONGEST_LITERAL:
        return text
    try:
        node = ast.parse(text.strip(), mode="eval").body
        return Reader().value(node) if _is_call(node) else ast.literal_eval(node)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text


def _is_call(node: ast.expr) -> bool:
    inner = node.elts if isinstance(node, ast.Tuple) else node.keys if isinstance(node, ast.Dict) else ()
    return isinstance(node, ast.Call) or any(item is not None and _is_call(item) for item in inner)


class Reader:
    """Reads values from Python expressions, of which nothing is executed or imported.

    These are literals, constructor calls of known classes, and names of earlier values.

    Attributes:
        names: Values by name.
    """

    def __init__(self) -> None:
        """Knows no names yet."""
        self.names: dict[str, object] = {}

    def value(self, node: ast.expr) -> object:
        """Returns the value of an expression.

        Raises:
            SpecError: It is another expression, or an object has problems.
        """
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.Tuple):
            return tuple(self.value(item) for item in node.elts)
        if isinstance(node, ast.List):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict) and None not in node.keys:  # such as a mixture's sources
            return {
                self.value(key): self.value(value) for key, value in zip(node.keys, node.values, strict=True) if key
            }
        if isinstance(node, ast.Call):
            return self._called(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            raise self.refused(node, f"{brief(node)} is neither a literal nor a constructor call") from None

    def construct(self, node: ast.Call, cls: type[Spec], positional: list[object], named: dict[str, object]) -> Spec:
        """Returns the object of a constructor call."""
        return cls(*positional, **named)

    def refused(self, node: ast.AST, message: str) -> SpecError:
        """Returns the error for an expression."""
        return SpecError([Problem("", message)])

    def _called(self, node: ast.Call) -> Spec:
        called = ast.unparse(node.func).removeprefix("nnxdsl.")[:60]
        cls = registry.get(called)
        if cls is None:
            family = registry.get(called.partition(".")[0])
            names = registry if family is None else [cls.__qualname__ for cls in members(family).values()]
            hint = nearest(called, names) or "; text with parentheses needs quotes"
            raise self.refused(node, f"there is no '{called}'{hint}")
        if is_family(cls) and not (cls.default_member and node.args):
            raise self.refused(node, f"{called} is a family; use one of its members: {members_hint(cls)}")
        keywords = [keyword.arg for keyword in node.keywords]
        if None in keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            raise self.refused(node, f"* and ** are not understood in {called}(...)")
        twice = sorted({str(name) for name in keywords if keywords.count(name) > 1})
        if twice:
            raise self.refused(node, f"{called}(...) is given {', '.join(twice)} twice")
        positional = [self.value(argument) for argument in node.args]
        named = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
        return self.construct(node, cls, positional, named)


def brief(node: ast.AST) -> str:
    """The first line of a node's source, with at most 60 characters."""
    text = ast.unparse(node).partition("\n")[0]
    return text if len(text) <= 60 else f"{text[:57]}..."


def _arguments(spec: Spec) -> Iterator[tuple[str, object]]:
    """What a constructor call must be given: `("", "1b")` for what goes without a name, `("rank=", 8)` for the rest."""
    fields = declared(type(spec))
    for name, field in fields.items():
        if field.positional:
            yield "", getattr(spec, name)
    for name, field in fields.items():
        value = getattr(spec, name)
        if not field.positional and (field.default is attrs.NOTHING or field.default != value):
            yield f"{name}=", value


def _layout(value: object, names: Names, *, indent: int, before: int, after: int, explode: bool = False) -> str:
    """`value` on the line that it starts, if it fits between the text before and after it; else one item a line."""
    flat = render(value, names)
    called, brackets = "", "()"
    if isinstance(value, Spec):
        called, _, _ = flat.partition("(")
        items = list(_arguments(value))
    elif isinstance(value, tuple | list):
        brackets = "[]" if isinstance(value, list) else brackets
        items = [("", item) for item in cast("list[object]", value)]
    elif isinstance(value, Mapping):
        brackets = "{}"
        items = [(f"{_quoted(name)}: ", item) for name, item in cast("Mapping[str, object]", value).items()]
    else:
        return flat
    if not items or (not explode and indent + before + _columns(flat) + after <= WIDTH):
        return flat
    pad = " " * (indent + 4)
    lines = [
        f"{pad}{name}{_layout(item, names, indent=indent + 4, before=_columns(name), after=1)},\n"
        for name, item in items
    ]
    return f"{called}{brackets[0]}\n{''.join(lines)}{' ' * indent}{brackets[1]}"


def _columns(text: str) -> int:
    """How wide a terminal shows a text: ideographs take two columns, combining marks none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in ("W", "F") for character in text)
    return len(text) + wide - sum(unicodedata.category(character) in ("Mn", "Me", "Cf") for character in text)


def _quoted(text: str) -> str:
    """A string literal in double quotes, in single ones where that saves backslashes."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + "".join(_escaped(character, quote) for character in text) + quote


def _escaped(character: str, quote: str) -> str:
    if character == quote:
        return f"\\{character}"
    return character if character in "\"'" else repr(character)[1:-1]


def _imports(spec: Spec, variable: str) -> tuple[str, Names]:
    """The import lines of a file that builds `spec`, and what each class is called below them."""
    classes = sorted(set(_classes(spec)), key=lambda cls: cls.tag)
    homes: dict[str, set[str]] = defaultdict(set)
    for cls in classes:
        require_importable(cls)
        homes[_top(cls)].add(_home(cls))
    names: dict[type[Spec], str] = {}
    taken: dict[str, set[str]] = defaultdict(set)
    whole: set[str] = set()
    for cls in classes:
        if is_builtin(cls) or (len(homes[_top(cls)]) == 1 and _top(cls) != variable):
            names[cls] = cls.__qualname__
            taken[_home(cls)].add(_top(cls))
        else:  # two classes of one name: nnxdsl's has it, others keep their module before it
            names[cls] = f"{cls.__module__}.{cls.__qualname__}"
            whole.add(cls.__module__)
    lines = [f"import {module}\n" for module in sorted(whole)]
    for module in sorted(taken):
        line = f"from {module} import {', '.join(sorted(taken[module]))}\n"
        wrapped = "".join(f"    {name},\n" for name in sorted(taken[module]))
        lines.append(line if len(line) <= WIDTH + 1 else f"from {module} import (\n{wrapped})\n")
    return "".join(lines), names


def _top(cls: type[Spec]) -> str:
    return cls.family.__name__ if is_builtin(cls) else cls.__qualname__.split(".")[0]


def _home(cls: type[Spec]) -> str:
    return "nnxdsl" if is_builtin(cls) else cls.__module__


def _classes(value: object) -> Iterator[type[Spec]]:
    if isinstance(value, Spec):
        yield type(value)
        for _, child in _arguments(value):
            yield from _classes(child)
    elif isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from _classes(item)
