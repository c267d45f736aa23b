"""What every spec object is: a frozen attrs class that checks all its fields and says all that is wrong at once.

Knows nothing of what the objects mean. A class below `Spec` is a family (`Objective`) or a single noun (`Mesh`); a class
below a family is a member, reachable as `Objective.DPO`.
"""

from __future__ import annotations

import functools
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import attrs

from nnxdsl.spec.errors import Problem, SpecError, suggest

_HOME = "nnxdsl.spec."
registry: dict[str, type[Spec]] = {}
"""Every noun, family and built-in member by the name that Python code uses for it: `Mesh`, `Objective`, `Objective.DPO`."""


@attrs.frozen(kw_only=True)
class Spec:
    """Base of every object that an experiment is made of.

    Subclasses are decorated with `@attrs.frozen(kw_only=True)`. A class may override `problems` to check fields against
    each other. Fields are strictly typed (only int widens to float), and hold numbers, text, tuples, None and other specs.
    """

    family: ClassVar[type[Spec]]
    tag: ClassVar[str]

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        _require_frozen(cls)
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Spec))
        cls.family = cls if parent is Spec else parent.family
        if cls.__module__.startswith(_HOME):
            if cls.family is not cls:
                setattr(cls.family, cls.__name__, cls)
                cls.__qualname__ = f"{cls.family.__name__}.{cls.__name__}"
            cls.tag = cls.__name__
            registry[cls.__qualname__] = cls
        else:
            cls.tag = f"{cls.__module__}:{cls.__qualname__}"
        _check_when_built(cls)

    def problems(self) -> Iterable[Problem]:
        """What is wrong between fields that are each right alone; paths relative to this object."""
        return ()


Spec.family = Spec
SpecT = TypeVar("SpecT", bound=Spec)


def _require_frozen(cls: type[Spec]) -> None:
    options = getattr(cls, "__attrs_props__", None)
    frozen = options.is_frozen if options is not None else cls.__setattr__ is not object.__setattr__
    if not frozen:
        raise TypeError(f"{cls.__qualname__} must be declared with @attrs.frozen(kw_only=True)")


def _check_when_built(cls: type[Spec]) -> None:
    """Replace the `__init__` that attrs wrote by one that checks first and reports everything together."""
    plain = cls.__dict__.get("__init__")
    if plain is None:  # a class without fields of its own and without the decorator
        return

    @functools.wraps(plain)
    def __init__(self: Spec, *args: object, **values: object) -> None:
        if type(self) is not cls:  # pragma: no cover - a subclass always has its own __init__
            plain(self, *args, **values)
            return
        given, problems = _bind(cls, args, values)
        clean, found = check_fields(cls, given)
        problems += found
        problems += [
            Problem(field.name, f"{cls.__qualname__} needs it")
            for field in attrs.fields(cls)
            if field.default is attrs.NOTHING and field.name not in given
        ]
        if cls.family is cls and is_family(cls):
            problems.append(Problem("", f"{cls.__name__} is a family; use one of its members{members_hint(cls)}"))
        if not problems:
            plain(self, **clean)
            problems += self.problems()
        if problems:
            raise SpecError(problems, describe(cls, given))

    cls.__init__ = __init__  # type: ignore[method-assign]
    cls.__plain_init__ = plain  # type: ignore[attr-defined]


def _bind(
    cls: type[Spec], args: tuple[object, ...], values: Mapping[str, object]
) -> tuple[dict[str, object], list[Problem]]:
    positional = [field.name for field in attrs.fields(cls) if not field.kw_only]
    if len(args) > len(positional):
        allowed = f"only {', '.join(positional)}" if positional else "no value"
        raise SpecError([Problem("", f"takes {allowed} without its name, got {args!r}")], cls.__qualname__)
    return {**dict(zip(positional, args, strict=False)), **values}, []


def check_fields(cls: type[Spec], values: Mapping[str, object]) -> tuple[dict[str, object], list[Problem]]:
    """The values that are right, as the class will hold them, and the problems of all others."""
    clean: dict[str, object] = {}
    problems: list[Problem] = []
    hints = field_types(cls)
    fields = attrs.fields_dict(cls)
    for name, value in values.items():
        field = fields.get(name)
        if field is None:
            problems.append(Problem(name, f"{cls.__name__} has no field '{name}'{suggest(name, fields)}"))
            continue
        held, found = check_value(value, hints[name])
        if not found and field.validator is not None:
            try:
                field.validator(None, field, held)
            except ValueError as error:
                found = [Problem("", str(error))]
        if found:
            problems += [problem.under(name) for problem in found]
        else:
            clean[name] = held
    return clean, problems


def assemble(cls: type[SpecT], values: Mapping[str, object], problems: list[Problem]) -> SpecT | None:
    """Build `cls` as far as its values allow, adding what is wrong to `problems`.

    What is wrong is left out or takes its default, so that checks between fields still run and a caller can show every
    problem of a tree at once. The object must be used only if `problems` stayed empty; None if a needed field is missing.
    """
    clean, found = check_fields(cls, values)
    problems += found
    missing = [f.name for f in attrs.fields(cls) if f.default is attrs.NOTHING and f.name not in clean]
    problems += [Problem(name, f"{cls.__name__} needs it") for name in missing if name not in values]
    if missing:
        return None
    built = object.__new__(cls)
    cls.__plain_init__(built, **clean)  # type: ignore[attr-defined]
    said = {problem.path for problem in problems}
    problems += [problem for problem in built.problems() if problem.path not in said]
    return built


@functools.cache
def field_types(cls: type[Spec]) -> dict[str, Any]:
    """The resolved annotation of every field of `cls`."""
    nouns = {name: noun for name, noun in registry.items() if "." not in name}
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        space = {**nouns, **vars(sys.modules.get(base.__module__, types))}
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if name in attrs.fields_dict(cls):
                hints[name] = eval(annotation, space) if isinstance(annotation, str) else annotation  # noqa: S307
    return hints


def check_value(value: object, annotation: Any) -> tuple[object, list[Problem]]:
    """`value` as a field of this type holds it (an int becomes a float where one is asked for), or what is wrong."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return _check_union(value, typing.get_args(annotation))
    if origin is typing.Literal:
        choices = typing.get_args(annotation)
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value, []
        hint = suggest(value, [str(choice) for choice in choices]) if isinstance(value, str) else ""
        listed = ", ".join(repr(choice) for choice in choices)
        return value, [Problem("", f"expected one of {listed}, got {value!r}{hint if 'mean' in hint else ''}")]
    if origin is tuple:
        return _check_tuple(value, typing.get_args(annotation))
    if annotation is float:
        if type(value) is int:
            value = float(value)
        if type(value) is float:
            return value, [] if math.isfinite(value) else [Problem("", f"expected a finite number, got {value}")]
    elif type(value) is annotation:
        return value, []
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        if isinstance(value, annotation):
            return value, []
        return value, [Problem("", f"expected {annotation.__name__}, got {show(value)}{_instead(value, annotation)}")]
    return value, [Problem("", f"expected {type_name(annotation)}, got {show(value)}")]


def _check_union(value: object, arms: tuple[Any, ...]) -> tuple[object, list[Problem]]:
    if value is None and types.NoneType in arms:
        return None, []
    arms = tuple(arm for arm in arms if arm is not types.NoneType)
    if len(arms) == 1:
        return check_value(value, arms[0])
    for arm in arms:
        held, found = check_value(value, arm)
        if not found:
            return held, []
    return value, [Problem("", f"expected {' or '.join(type_name(arm) for arm in arms)}, got {show(value)}")]


def _check_tuple(value: object, arms: tuple[Any, ...]) -> tuple[object, list[Problem]]:
    expected = type_name(tuple[arms])  # type: ignore[valid-type]
    if not isinstance(value, tuple):
        hint = f"; write {show(tuple(value))}" if isinstance(value, list) else ""
        hint = hint or (f"; write ({value!r},)" if isinstance(value, str) else "")
        return value, [Problem("", f"expected {expected}, got {show(value)}{hint}")]
    items: tuple[object, ...] = value
    endless = len(arms) == 2 and arms[1] is Ellipsis
    if not endless and len(items) != len(arms):
        return value, [Problem("", f"expected {expected}, got {show(value)}")]
    held: list[object] = []
    problems: list[Problem] = []
    for index, item in enumerate(items):
        kept, found = check_value(item, arms[0] if endless else arms[index])
        held.append(kept)
        problems += [problem.under(str(index)) for problem in found]
    return tuple(held), problems


def _instead(value: object, annotation: type[Spec]) -> str:
    if isinstance(value, type) and issubclass(value, annotation):
        return f"; write {value.__qualname__}(...)"
    if isinstance(value, str):
        return f"; use one of its members{members_hint(annotation)}" if is_family(annotation) else ""
    return ""


def is_family(cls: type[Spec]) -> bool:
    """Whether `cls` is a family whose members are used in its place."""
    return cls.family is cls and bool(members(cls))


def members(family: type[Spec]) -> dict[str, type[Spec]]:
    """The built-in members of a family by short name."""
    prefix = f"{family.__name__}."
    return {name.removeprefix(prefix): cls for name, cls in registry.items() if name.startswith(prefix)}


def members_hint(family: type[Spec]) -> str:
    """`: Objective.DPO, Objective.SFT`, for messages."""
    return ": " + ", ".join(f"{family.__name__}.{name}" for name in members(family))


def describe(cls: type[Spec], values: Mapping[str, object]) -> str:
    """`Experiment 'dpo-gemma3-1b'`: the class, and the name if it has one."""
    called = values.get("name")
    return f"{cls.__qualname__} {called!r}" if isinstance(called, str) else cls.__qualname__


def show(value: object) -> str:
    """A value as messages show it: short, and specs by their name alone."""
    if isinstance(value, Spec):
        return type(value).__qualname__
    text = repr(value)
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
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")

