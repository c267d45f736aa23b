"""Converts between an experiment and the texts of a form's inputs, one text per path.

`objective.beta` is "0.1", `objective.type` is "DPO", `evaluation.type` is "" for None. A tuple of specs is the
number of its members: `objective.rewards` is "2", `objective.rewards.0.name` is "exact_answer". Members may be pairs
of a spec and a plain value: `data.sources.0.0.path` and the weight `data.sources.0.1`.
"""

from __future__ import annotations

import ast
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, cast

import attrs

from nnxdsl.config.core.base import Spec, declared, is_family, members
from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.fields import arms, type_name
from nnxdsl.config.core.json_object import JsonObject
from nnxdsl.config.core.serialization import from_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import Problem, SpecError, join

from ...words import whole

NONE = ""
"""Text of a type whose field is None."""

DEEPEST = 12
LONGEST = 20_000
MAX_ITEMS = 100
"""Maximum number of members in a tuple of specs, such as the rewards of GRPO."""

# From an object to texts


def texts_of(value: Spec, path: str = "") -> dict[str, str]:
    """Returns the texts of a form that shows `value`, by path."""
    found = {join(path, "type"): value.tag}
    for name, field in declared(type(value)).items():
        found |= _texts(getattr(value, name), field.type, join(path, name))
    return found


def _texts(value: object, annotation: Any, path: str) -> dict[str, str]:
    spec = spec_in(annotation)
    if spec is not None:
        return {join(path, "type"): NONE} if value is None else texts_of(cast("Spec", value), path)
    parts = item_parts(annotation)
    if parts and isinstance(value, tuple):
        found = {path: str(len(value))}
        for index, item in enumerate(cast("tuple[Any, ...]", value)):
            for (suffix, part), each in zip(parts, (item,) if len(parts) == 1 else item, strict=True):
                found |= _texts(each, part, join(join(path, str(index)), suffix))
        return found
    return {path: written(value, annotation)}


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
        if len(value) == 1 and str in arms(annotation):  # without brackets it would be the text alone
            return render(value)
        if kind is str and all("\n" not in item and item.strip() for item in value) and not value[0].startswith("("):
            return "\n".join(value)
        if typing.get_origin(kind) is typing.Literal:
            return ", ".join(map(str, value))
        if is_named(annotation):
            lines = [f"{name}: {each}" for name, each in cast("tuple[tuple[str, object], ...]", value)]
            if _parsed_lines("\n".join(lines), kind) == [list(each) for each in value]:
                return "\n".join(lines)
    return render(value)


# From texts to an object


def read(texts: Mapping[str, str]) -> tuple[Experiment | None, list[Problem]]:
    """Parses a form's texts: returns the experiment, or None and all problems; unknown fields are ignored."""
    problems: list[Problem] = []
    tree = _tree(Experiment, texts, "", problems, 0)
    if problems:
        wrong = {problem.path for problem in problems}
        try:
            from_dict({"type": "Experiment", **tree}, Experiment)
        except SpecError as error:
            problems += [problem for problem in error.problems if problem.path not in wrong]
        return None, problems
    try:
        return from_dict({"type": "Experiment", **tree}, Experiment), []
    except SpecError as error:
        return None, list(error.problems)


def _tree(cls: type[Spec], texts: Mapping[str, str], path: str, problems: list[Problem], depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in declared(cls).items():
        where = join(path, name)
        value = _value(field.type, texts, where, problems, depth)
        if value is not _MISSING:
            found[name] = value
    return found


def _value(annotation: Any, texts: Mapping[str, str], path: str, problems: list[Problem], depth: int) -> Any:
    spec, parts = spec_in(annotation), item_parts(annotation)
    if spec is not None:
        return _node(spec, is_optional(annotation), texts, path, problems, depth)
    if path not in texts:
        return _MISSING
    return _items(parts, texts, path, problems, depth) if parts else _parsed(texts[path], annotation, path, problems)


_MISSING = object()


def _node(
    spec: type[Spec], optional: bool, texts: Mapping[str, str], path: str, problems: list[Problem], depth: int
) -> Any:
    chosen = texts.get(join(path, "type"))
    if chosen is None or depth >= DEEPEST:
        return _MISSING
    if chosen == NONE:
        return None if optional else _MISSING
    member = member_of(spec, chosen)
    if member is None:
        problems.append(Problem(path, f"there is no {chosen[:40]!r} here"))
        return _MISSING
    return {"type": member.tag, **_tree(member, texts, path, problems, depth + 1)}


def _items(parts: Parts, texts: Mapping[str, str], path: str, problems: list[Problem], depth: int) -> Any:
    count = item_count(texts, path)
    if count is None:
        problems.append(Problem(path, f"expected a number of members up to {MAX_ITEMS}, got {texts[path][:40]!r}"))
        return _MISSING
    found: list[Any] = []
    for index in range(count):
        values: list[Any] = []
        for suffix, part in parts:
            where = join(join(path, str(index)), suffix)
            value = _value(part, texts, where, problems, depth)
            if value is _MISSING and not any(problem.path == where for problem in problems):
                spec = spec_in(part)
                wanted = f"choose one of {', '.join(choices_of(spec))}" if spec else "needs a value"
                problems.append(Problem(where, wanted))
            values.append(None if value is _MISSING else value)
        found.append(values[0] if len(parts) == 1 else values)
    return found


def item_count(texts: Mapping[str, str], path: str) -> int | None:
    """Number of members of a tuple of specs; None if its text is not a valid number."""
    count = whole(texts.get(path, "") or "0")
    return count if count is not None and count <= MAX_ITEMS else None


def _parsed(text: str, annotation: Any, path: str, problems: list[Problem]) -> Any:
    """Parses a text into a JSON value; appends to `problems` if it is invalid."""
    if len(text) > LONGEST:
        problems.append(Problem(path, f"{len(text):,} characters; at most {LONGEST:,}"))
        return _MISSING
    kinds, optional = [arm for arm in arms(annotation) if arm is not types.NoneType], is_optional(annotation)
    kind = kinds[0]
    if kind is bool:
        return text == "true"
    if text.strip() == "" and kind is not str and typing.get_origin(kind) is not tuple:
        if optional:
            return None
        problems.append(Problem(path, "needs a value"))
        return _MISSING
    if kind is str and (len(kinds) == 1 or items_of(annotation) is str):
        if len(kinds) > 1 and (text.strip().startswith("(") or len(text.split("\n")) > 1):
            return _parsed_tuple(text, kinds[1], optional, path, problems)
        return None if optional and not text else text
    if typing.get_origin(kind) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        return choices.get(text, text)
    if typing.get_origin(kind) is tuple and len(kinds) == 1:
        return _parsed_tuple(text, kind, optional, path, problems)
    if kind is JsonObject:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return _literal(text, kind, path, problems)  # Python's True and None
    return _literal(text, kind, path, problems)


def _parsed_tuple(text: str, kind: Any, optional: bool, path: str, problems: list[Problem]) -> Any:
    stripped = text.strip()
    if not stripped:
        return None if optional else []
    items = items_of(kind)
    if items is str and not stripped.startswith("("):
        return [line for line in text.splitlines() if line.strip()]
    if typing.get_origin(items) is typing.Literal and not stripped.startswith("("):
        return [word.strip() for word in stripped.split(",") if word.strip()]
    if is_named(kind) and not stripped.startswith("("):
        found = _parsed_lines(text, items)
        if found is None:
            problems.append(Problem(path, f"expected lines `name: {type_name(typing.get_args(items)[1])}`"))
        return _MISSING if found is None else found
    return _literal(text, kind, path, problems)


def _parsed_lines(text: str, pair: Any) -> list[list[Any]] | None:
    """Pairs of the lines `name: value`; None if a line is none."""
    kind, found = typing.get_args(pair)[1], []
    for line in filter(str.strip, text.splitlines()):
        name, colon, value = (part.strip() for part in line.partition(":"))
        try:
            found.append([name, kind(value)])
        except ValueError:
            return None
        if not (name and colon and value):
            return None
    return found


def _literal(text: str, kind: Any, path: str, problems: list[Problem]) -> Any:
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        problems.append(Problem(path, f"expected {type_name(kind)}, got {text[:40]!r}"))
        return _MISSING
    return _as_json(value)


def _as_json(value: Any) -> Any:
    return [_as_json(item) for item in value] if isinstance(value, tuple | list) else value


def choices_of(spec: type[Spec]) -> dict[str, type[Spec]]:
    """Classes that are allowed in a field of a class or family, by name."""
    return members(spec) if is_family(spec) else {spec.__name__: spec}


def member_of(spec: type[Spec], name: str) -> type[Spec] | None:
    """Class of a choice."""
    return choices_of(spec).get(name)


def spec_in(annotation: Any) -> type[Spec] | None:
    """Spec class of a field's values; None for plain values."""
    return next((arm for arm in arms(annotation) if isinstance(arm, type) and issubclass(arm, Spec)), None)


Parts = tuple[tuple[str, Any], ...]


def item_parts(annotation: Any) -> Parts:
    """What each member of a variable-length tuple of specs is made of: end of its path, and type; else empty.

    A member is a spec, or a tuple such as a spec and its weight.
    """
    items = items_of(annotation)
    if typing.get_origin(items) is tuple and any(spec_in(part) for part in typing.get_args(items)):
        return tuple((str(index), part) for index, part in enumerate(typing.get_args(items)))
    return () if items is None or spec_in(items) is None else (("", items),)


def is_named(annotation: Any) -> bool:
    """Whether a field holds plain values by name, written as lines `name: value`."""
    pair = typing.get_args(items_of(annotation))
    return len(pair) == 2 and pair[0] is str and pair[1] in (str, int, float)


def is_optional(annotation: Any) -> bool:
    """Whether a field accepts None."""
    return types.NoneType in arms(annotation)


def items_of(annotation: Any) -> Any:
    """Member type of a variable-length tuple; None for other types."""
    for arm in arms(annotation):
        given = typing.get_args(arm)
        if typing.get_origin(arm) is tuple and len(given) == 2 and given[1] is Ellipsis:
            return given[0]
    return None


def completed(texts: Mapping[str, str], cls: type[Spec] = Experiment, path: str = "", depth: int = 0) -> dict[str, str]:
    """Adds defaults for fields that newly chosen classes add, and drops fields that they lack."""
    found: dict[str, str] = {join(path, "type"): cls.tag}
    for name, field in declared(cls).items():
        where = join(path, name)
        spec, parts = spec_in(field.type), item_parts(field.type)
        is_given = (where if spec is None else join(where, "type")) in texts
        if not is_given and field.default is not attrs.NOTHING:
            found |= _texts(field.default, field.type, where)
        elif parts:
            found[where] = texts.get(where, "0")
            for index in range(item_count(texts, where) or 0):
                for suffix, part in parts:
                    found |= _completed_part(texts, part, join(join(where, str(index)), suffix), depth)
        elif spec is not None:
            found |= _completed_node(texts, spec, where, depth)
        else:
            found[where] = texts.get(where, "")
    return found


def _completed_part(texts: Mapping[str, str], part: Any, path: str, depth: int) -> dict[str, str]:
    """Texts of a part of a member; a new one is of the only class, or its weight is 1."""
    spec = spec_in(part)
    if spec is None:
        return {path: texts.get(path, "1" if part in (int, float) else "")}
    choices = choices_of(spec)
    type_path = join(path, "type")
    only = {type_path: next(iter(choices))} if len(choices) == 1 else {}
    return _completed_node({**only, **texts}, spec, path, depth)


def _completed_node(texts: Mapping[str, str], spec: type[Spec], path: str, depth: int) -> dict[str, str]:
    member = member_of(spec, texts.get(join(path, "type"), NONE))
    if member is None or depth >= DEEPEST:
        return {join(path, "type"): NONE}
    return completed(texts, member, path, depth + 1)
