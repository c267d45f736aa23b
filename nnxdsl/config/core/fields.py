"""Type annotations of spec fields, and the check of values against them."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from nnxdsl.config.core.json_object import JsonObject
from nnxdsl.errors import Problem, nearest

if TYPE_CHECKING:
    K = TypeVar("K")
    V = TypeVar("V")
    Pairs = Mapping[K, V] | tuple[tuple[K, V], ...]
else:

    class Pairs:
        """Annotates a field that is written as a mapping and held as a tuple of pairs: `dict(field)` gives it back."""

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return tuple[tuple[types], ...]


NUMBERS = (int, float, bool)
ALLOWED = (
    "a field holds int, float, str, bool, Literal, a spec class or family, tuple[...] of these, Json, or one of these "
    "or None"
)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; the annotation alone where it is none."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def resolve(cls: type, space: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """The wanted annotations of one class body as types, names looked up in `space`.

    Raises:
        TypeError: if a name in an annotation is not defined.
    """
    resolved: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if name in names:
            try:
                resolved[name] = eval(annotation, dict(space)) if isinstance(annotation, str) else annotation
            except (NameError, AttributeError, SyntaxError, TypeError) as error:
                location = f"{cls.__module__}.{cls.__qualname__}.{name}"
                raise TypeError(f"{location}: annotation {annotation}: {error}") from error
    return resolved


def check_annotation(annotation: Any, location: str, spec: type) -> None:
    """Refuse an annotation whose values would be ambiguous in JSON or could not be checked; `spec` is the base class.

    Raises:
        TypeError: saying what may be written.
    """
    problem = _annotation_problem(annotation, spec)
    if problem:
        raise TypeError(f"{location}: {problem}; {ALLOWED}")


def _annotation_problem(annotation: Any, spec: type) -> str:
    alternatives = union_members(annotation)
    if len(alternatives) > 1:
        numbers = [arm for arm in alternatives if arm in NUMBERS]
        tuples = [arm for arm in alternatives if typing.get_origin(arm) is tuple]
        specs = [arm for arm in alternatives if attrs.has(arm)]
        for group in (numbers, tuples, specs):
            if len(group) > 1:
                return f"{type_name(annotation)} leaves open which of {' and '.join(map(type_name, group))} is meant"
        return next(filter(None, (_annotation_problem(arm, spec) for arm in alternatives)), "")
    if typing.get_origin(annotation) is tuple:
        items = [item for item in typing.get_args(annotation) if item is not Ellipsis]
        return next(filter(None, (_annotation_problem(item, spec) for item in items)), "")
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return "" if all(type(choice) in (str, int, bool) for choice in choices) else f"{annotation} is not plain"
    if annotation in (*NUMBERS, str, JsonObject, types.NoneType) or (
        inspect.isclass(annotation) and issubclass(annotation, spec)
    ):
        return ""
    return f"{type_name(annotation)} is not understood"


def check_value(value: object, annotation: Any) -> tuple[object, list[Problem]]:
    """`value` as a field of this type stores it (an int becomes a float where the field is one), or the problems."""
    if value.__class__ is annotation and annotation in (int, bool):
        return value, []
    if annotation is float:
        return _check_float(value)
    if annotation is str:
        return _check_text(value)
    if annotation is JsonObject:
        return _check_json(value)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _check_union(value, typing.get_args(annotation))
    if origin is typing.Literal:
        return value, _check_choice(value, typing.get_args(annotation))
    if origin is tuple:
        return _check_tuple(value, typing.get_args(annotation))
    if attrs.has(annotation):
        if isinstance(value, annotation):
            return value, []
        return value, _expected(type_name(annotation), value, cast("Any", annotation).hint_for(value))
    return value, _expected(type_name(annotation), value, _plain(value, annotation))


def _expected(what: str, value: object, remedy: str = "") -> list[Problem]:
    return [Problem("", f"expected {what}, got {show(value)}{remedy}")]


def _plain(value: object, annotation: type) -> str:
    """The fix for a number that is of a subclass, such as numpy's, and therefore not what JSON would give back."""
    subclass = isinstance(value, annotation) and not isinstance(value, bool)
    return f"; write {annotation.__name__}({value})" if subclass else ""


def _check_float(value: object) -> tuple[object, list[Problem]]:
    if type(value) not in (int, float):
        return value, _expected("float", value, _plain(value, float))
    try:
        held = float(cast("float", value))
    except OverflowError:
        held = math.inf
    if not math.isfinite(held):
        return value, [Problem("", f"expected a finite number, got {show(value)}")]
    return held + 0.0, []  # -0.0 becomes 0.0: the two are equal, so they have to be the same text too


def _check_text(value: object) -> tuple[object, list[Problem]]:
    if type(value) is not str:
        return value, _expected("str", value, f"; write {str(value)!r}" if isinstance(value, str) else "")
    try:
        value.encode()
    except UnicodeEncodeError:
        return value, _expected("text that UTF-8 can hold", value)
    return value, []


def _check_json(value: object) -> tuple[object, list[Problem]]:
    if not isinstance(value, Mapping):
        return value, _expected("a mapping of JSON values", value, "; write {'name': value}")
    try:
        return JsonObject(cast("Mapping[str, Any]", value)), []
    except ValueError as error:
        return cast("object", value), [Problem("", str(error))]


def _check_choice(value: object, choices: tuple[Any, ...]) -> list[Problem]:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return []
    hint = nearest(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
    return _expected("one of " + ", ".join(repr(choice) for choice in choices), value, hint)


def _check_union(value: object, alternatives: tuple[Any, ...]) -> tuple[object, list[Problem]]:
    if value is None and types.NoneType in alternatives:
        return None, []
    real = tuple(arm for arm in alternatives if arm is not types.NoneType)
    attempts = [check_value(value, arm) for arm in real]
    for checked, problems in attempts:
        if not problems:
            return checked, []
    if len(real) == 1:
        return attempts[0]
    inner = next((problems for _, problems in attempts if all(problem.path for problem in problems)), None)
    return value, inner or _expected(" or ".join(type_name(arm) for arm in alternatives), value)


def _check_tuple(value: object, item_types: tuple[Any, ...]) -> tuple[object, list[Problem]]:
    expected = type_name(tuple.__class_getitem__(item_types))
    items = cast("tuple[object, ...]", value)
    item_annotations = of_each(item_types, len(items)) if isinstance(value, tuple) else None
    if item_annotations is None:
        return items, _expected(expected, items, _as_tuple(items))
    checked_items: list[object] = []
    problems: list[Problem] = []
    for index, (item, item_type) in enumerate(zip(items, item_annotations, strict=True)):
        checked, item_problems = check_value(item, item_type)
        checked_items.append(checked)
        problems += [problem.under(str(index)) for problem in item_problems]
    return tuple(checked_items), problems


def as_pairs(value: object, annotation: Any) -> object:
    """The items of a mapping that is given for a tuple of pairs; any other value as it is."""
    pair, *rest = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else (None,)
    is_pairs = rest == [Ellipsis] and typing.get_origin(pair) is tuple and len(typing.get_args(pair)) == 2
    return tuple(cast("Mapping[object, object]", value).items()) if is_pairs and _is_mapping(value) else value


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def of_each(item_types: tuple[Any, ...], count: int) -> list[Any] | None:
    """The type of each of `count` items of a tuple; None if it cannot have so many."""
    if len(item_types) == 2 and item_types[1] is Ellipsis:
        return [item_types[0]] * count
    return list(item_types) if len(item_types) == count else None


def _as_tuple(value: object) -> str:
    if isinstance(value, list):
        return f"; write {show(tuple(cast('list[object]', value)))}"
    return f"; write ({value!r},)" if isinstance(value, str) else ""


def show(value: object) -> str:
    """A value as messages show it: short, specs by their name alone."""
    if attrs.has(type(value)):
        return type(value).__qualname__
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    text = repr(value)
    if type(value) is tuple:
        items = [show(item) for item in cast("tuple[object, ...]", value)]
        text = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return text if len(text) <= 60 else text[:57] + "..."


def type_name(annotation: Any) -> str:
    """An annotation as a person writes it: `int`, `tuple[str, ...]`, `Weights or None`."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arm) for arm in typing.get_args(annotation))
    if origin is tuple:
        return f"tuple[{', '.join('...' if a is Ellipsis else type_name(a) for a in typing.get_args(annotation))}]"
    if annotation is types.NoneType:
        return "None"
    return annotation.__qualname__ if inspect.isclass(annotation) else str(annotation).removeprefix("typing.")
