"""Converts between an experiment and the texts of a form's inputs, one text per path.

`objective.beta` is "0.1", `objective.type` is "DPO", `evaluation.type` is "" for None. A tuple of specs is the
number of its members: `objective.rewards` is "2", `objective.rewards.0.name` is "exact_answer". Members may be pairs
of a spec and a plain value: `data.sources.0.0.path` and the weight `data.sources.0.1`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, cast

import attrs

from nnxdsl.config.core.base import Spec, declared, is_family, members
from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.fields import type_name, union_members
from nnxdsl.config.core.json_object import JsonObject
from nnxdsl.config.core.serialization import from_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import Problem, SpecError, join

from ...formatting import whole

NONE = ""  # text of a type whose field is None
MAX_DEPTH = 12
LONGEST = 20_000
MAX_ITEMS = 100  # maximum number of members in a tuple of specs, such as the rewards of GRPO

# From an object to texts


def texts_of(value: Spec) -> dict[str, str]:
    """Returns the texts of a form that shows `value`, by path."""
    return _texts(type(value), "", value, {})


def completed(texts: Mapping[str, str]) -> dict[str, str]:
    """Adds defaults for fields that newly chosen classes add, and drops fields that they lack."""
    return _texts(Experiment, "", attrs.NOTHING, {"type": Experiment.tag, **texts})


def _texts(annotation: Any, path: str, value: Any, texts: Mapping[str, str], depth: int = 0) -> dict[str, str]:
    """The texts of a field: those that are given, and else those of a value, if there is one."""
    spec, parts = spec_in(annotation), item_parts(annotation)
    is_given = (path if spec is None else join(path, "type")) in texts
    if spec is not None:
        held = value if isinstance(value, Spec) and not is_given else None
        member = choices_of(spec).get(texts.get(join(path, "type"), NONE)) if held is None else type(held)
        if member is None or depth > MAX_DEPTH:
            return {join(path, "type"): NONE}
        by_path = {join(path, "type"): member.tag}
        for name, field in declared(member).items():
            one = field.default if held is None else getattr(held, name)
            by_path |= _texts(field.type, join(path, name), one, texts, depth + 1)
        return by_path
    if not parts or not isinstance(value, tuple | type(attrs.NOTHING)):
        return {path: texts[path] if is_given else "" if value is attrs.NOTHING else written(value, annotation)}
    items = () if is_given or value is attrs.NOTHING else cast("tuple[Any, ...]", value)
    by_path = {path: texts.get(path, str(len(items)))}
    for index, member in enumerate(members_at(parts, path, item_count(by_path, path) or 0)):
        item = items[index] if index < len(items) else None
        each = [attrs.NOTHING] * len(parts) if item is None else item if len(parts) > 1 else [item]
        for (where, part), one in zip(member, each, strict=True):
            new: dict[str, str] = {}
            if item is None:  # it is of the only class or of its family's default, or its weight is 1
                choices = list(choices_of(of)) if (of := spec_in(part)) else []
                chosen = of.default_member if of and len(choices) > 1 else "".join(choices)
                new = {where: "1"} if part in (int, float) else {join(where, "type"): chosen} if chosen else {}
            by_path |= _texts(part, where, one, {**new, **texts}, depth)
    return by_path


def written(value: object, annotation: Any) -> str:
    """Formats a plain value for its input; None is an empty text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, JsonObject):
        return json.dumps(value.as_dict(), ensure_ascii=False)
    if isinstance(value, tuple):
        if not value:
            return ""
        kind = items_of(annotation)
        if len(value) == 1 and str in union_members(annotation):  # without brackets it would be the text alone
            return render(value)
        if kind is str and all("\n" not in item and item.strip() for item in value) and not value[0].startswith("("):
            return "\n".join(value)
        if typing.get_origin(kind) is typing.Literal:
            return ",".join(map(str, value))
        if is_named(annotation):
            lines = [f"{name}: {each}" for name, each in cast("tuple[tuple[str, object], ...]", value)]
            with contextlib.suppress(ValueError):
                if _parsed_lines("\n".join(lines), kind) == [list(each) for each in value]:
                    return "\n".join(lines)
    return render(value)


# From texts to an object


def read(texts: Mapping[str, str]) -> tuple[Experiment | None, list[Problem]]:
    """Parses a form's texts: returns the experiment, or None and all problems; unknown fields are ignored."""
    problems: list[Problem] = []
    tree = _tree(Experiment, texts, "", problems, 0)
    wrong = {problem.path for problem in problems}
    try:
        made = from_dict({"type": "Experiment", **tree}, Experiment)
    except SpecError as error:
        return None, [*problems, *(problem for problem in error.problems if problem.path not in wrong)]
    return None if problems else made, problems


def experiment_of(texts: Mapping[str, str]) -> Experiment:
    """Parses a draft's texts; a `SpecError` has all problems."""
    experiment, problems = read(texts)
    if experiment is None:
        raise SpecError(problems, "this draft")
    return experiment


def _tree(cls: type[Spec], texts: Mapping[str, str], path: str, problems: list[Problem], depth: int) -> dict[str, Any]:
    values = {
        name: _value(field.type, texts, join(path, name), problems, depth) for name, field in declared(cls).items()
    }
    return {name: value for name, value in values.items() if value is not _MISSING}


_MISSING = object()


def _value(annotation: Any, texts: Mapping[str, str], path: str, problems: list[Problem], depth: int) -> Any:
    """The JSON value of a field; where it has none, what is wrong is appended to the problems."""
    spec, parts = spec_in(annotation), item_parts(annotation)
    chosen = texts.get(path if spec is None else join(path, "type"))
    if chosen is None or depth >= MAX_DEPTH:
        return _MISSING
    try:
        if spec is None and not parts:
            return _parsed(chosen, annotation)
        if spec is None:
            return _items(parts, texts, path, problems, depth)
    except ValueError as error:
        problems.append(Problem(path, str(error)))
        return _MISSING
    if chosen == NONE:
        return None if is_optional(annotation) else _MISSING
    member = choices_of(spec).get(chosen)
    if member is None:
        problems.append(Problem(path, f"there is no {chosen[:40]!r} here"))
        return _MISSING
    return {"type": member.tag, **_tree(member, texts, path, problems, depth + 1)}


def _items(parts: Parts, texts: Mapping[str, str], path: str, problems: list[Problem], depth: int) -> list[Any]:
    count = item_count(texts, path)
    if count is None:
        raise ValueError(f"expected a number of members up to {MAX_ITEMS}, got {texts[path][:40]!r}")
    items: list[Any] = []
    for member in members_at(parts, path, count):
        values: list[Any] = []
        for where, part in member:
            value, spec = _value(part, texts, where, problems, depth), spec_in(part)
            if value is _MISSING and not any(problem.path == where for problem in problems):
                wanted = f"choose one of {', '.join(choices_of(spec))}" if spec else "needs a value"
                problems.append(Problem(where, wanted))
            values.append(None if value is _MISSING else value)
        items.append(values[0] if len(parts) == 1 else values)
    return items


def item_count(texts: Mapping[str, str], path: str) -> int | None:
    """Number of members of a tuple of specs; None if its text is not a valid number."""
    count = whole(texts.get(path, "") or "0")
    return count if count is not None and count <= MAX_ITEMS else None


def _parsed(text: str, annotation: Any) -> Any:
    """Parses a text into a JSON value; one that is none stays a text, which the experiment's own check refuses.

    A `ValueError` says that it is too long or empty, or no line `name: value`.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{len(text):,} characters; at most {LONGEST:,}")
    kinds = [arm for arm in union_members(annotation) if arm is not types.NoneType]
    kind, items, stripped = kinds[0], items_of(annotation), text.strip()
    if kind is bool:
        return text == "true"
    if is_optional(annotation) and not (text if kind is str else stripped):
        return None
    if kind is str and (len(kinds) == 1 or not (stripped.startswith("(") or "\n" in text)):
        return text
    if typing.get_origin(kind) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}.get(text, text)
    is_tuple = kind is str or typing.get_origin(kind) is tuple
    if not stripped and not is_tuple:
        raise ValueError("needs a value")
    if is_tuple and not stripped.startswith("("):
        if items is str or not stripped:
            return [line for line in text.splitlines() if line.strip()]
        if typing.get_origin(items) is typing.Literal:
            return [word.strip() for word in stripped.split(",") if word.strip()]
        if is_named(annotation):
            return _parsed_lines(text, items)
    if kind is JsonObject:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)  # or else Python's True and None
    try:
        return _as_json(ast.literal_eval(stripped))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _parsed_lines(text: str, pair: Any) -> list[list[Any]]:
    kind, items = typing.get_args(pair)[1], []
    for line in filter(str.strip, text.splitlines()):
        name, _, value = (part.strip() for part in line.partition(":"))
        try:
            if not name or not value:
                raise ValueError
            items.append([name, kind(value)])
        except ValueError:
            raise ValueError(f"expected lines `name: {type_name(kind)}`") from None
    return items


def _as_json(value: Any) -> Any:
    return [_as_json(item) for item in value] if isinstance(value, tuple | list) else value


# Fields


def choices_of(spec: type[Spec]) -> dict[str, type[Spec]]:
    """Classes that are allowed in a field of a class or family, by name."""
    return members(spec) if is_family(spec) else {spec.__name__: spec}


def spec_in(annotation: Any) -> type[Spec] | None:
    """Spec class of a field's values; None for plain values."""
    return next((arm for arm in union_members(annotation) if isinstance(arm, type) and issubclass(arm, Spec)), None)


Parts = tuple[tuple[str, Any], ...]


def item_parts(annotation: Any) -> Parts:
    """What each member of a variable-length tuple of specs is made of: end of its path, and type; else empty.

    A member is a spec, or a tuple such as a spec and its weight.
    """
    items = items_of(annotation)
    if typing.get_origin(items) is tuple and any(spec_in(part) for part in typing.get_args(items)):
        return tuple((str(index), part) for index, part in enumerate(typing.get_args(items)))
    return () if items is None or spec_in(items) is None else (("", items),)


def is_nested(annotation: Any) -> bool:
    """Whether a field holds specs."""
    return spec_in(annotation) is not None or bool(item_parts(annotation))


def members_at(parts: Parts, path: str, count: int) -> list[Parts]:
    """Paths and types of the parts of each member of a tuple of specs."""
    return [tuple((join(f"{path}.{index}", suffix), part) for suffix, part in parts) for index in range(count)]


def is_named(annotation: Any) -> bool:
    """Whether a field holds plain values by name, written as lines `name: value`."""
    pair = typing.get_args(items_of(annotation))
    return len(pair) == 2 and pair[0] is str and pair[1] in (str, int, float)


def is_optional(annotation: Any) -> bool:
    """Whether a field accepts None."""
    return types.NoneType in union_members(annotation)


def items_of(annotation: Any) -> Any:
    """Member type of a variable-length tuple; None for other types."""
    for arm in union_members(annotation):
        arguments = typing.get_args(arm)
        if typing.get_origin(arm) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return arguments[0]
    return None
