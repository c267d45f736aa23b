"""Converts between an experiment and the texts of a form's inputs, one text per path.

`objective.beta` is "0.1", `objective.type` is "DPO", `evaluation.type` is "" for None. A tuple of specs is the
number of its members: `objective.rewards` is "2", `objective.rewards.0.name` is "exact_answer".
"""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Mapping
from typing import Any, cast

import attrs

from nnxdsl.config.core.base import Spec, declared, is_family, members
from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.fields import arms, type_name
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
    if spec_items(annotation) is not None and isinstance(value, tuple):
        found = {path: str(len(value))}
        for index, item in enumerate(cast("tuple[Spec, ...]", value)):
            found |= texts_of(item, join(path, str(index)))
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
        spec, items = spec_in(field.type), spec_items(field.type)
        if spec is not None:
            value = _node(spec, is_optional(field.type), texts, where, problems, depth)
        elif where not in texts:
            value = _MISSING
        elif items is not None:
            value = _items(items, texts, where, problems, depth)
        else:
            value = _parsed(texts[where], field.type, where, problems)
        if value is not _MISSING:
            found[name] = value
    return found


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


def _items(spec: type[Spec], texts: Mapping[str, str], path: str, problems: list[Problem], depth: int) -> Any:
    count = item_count(texts, path)
    if count is None:
        problems.append(Problem(path, f"expected a number of members up to {MAX_ITEMS}, got {texts[path][:40]!r}"))
        return _MISSING
    found: list[Any] = []
    for index in range(count):
        where = join(path, str(index))
        value = _node(spec, False, texts, where, problems, depth)
        if value is _MISSING and not any(problem.path == where for problem in problems):
            problems.append(Problem(where, f"choose one of {', '.join(choices_of(spec))}"))
        found.append(None if value is _MISSING else value)
    return found


def item_count(texts: Mapping[str, str], path: str) -> int | None:
    """Number of members of a tuple of specs; None if its text is not a valid number."""
    count = whole(texts.get(path, "") or "0")
    return count if count is not None and count <= MAX_ITEMS else None


def with_item(texts: Mapping[str, str], path: str, spec: type[Spec]) -> dict[str, str]:
    """Appends a member with the defaults of its class to a tuple of specs."""
    count = item_count(texts, path) or 0
    choices = choices_of(spec)
    where = join(path, str(count))
    found = {**texts, path: str(min(count + 1, MAX_ITEMS)), join(where, "type"): NONE}
    return found | completed({}, choices[next(iter(choices))], where) if len(choices) == 1 else found


def without_item(texts: Mapping[str, str], path: str, index: int) -> dict[str, str]:
    """Removes one member of a tuple of specs; later members move up."""
    count = item_count(texts, path) or 0
    if not 0 <= index < count:
        return dict(texts)
    found: dict[str, str] = {}
    for name, text in texts.items():
        place, _, field = name.removeprefix(f"{path}.").partition(".")
        if not name.startswith(f"{path}.") or (at := whole(place)) is None or at < index:
            found[name] = text
        elif at > index:
            found[join(path, f"{at - 1}.{field}")] = text
    return {**found, path: str(count - 1)}


def items_at(texts: Mapping[str, str], path: str, cls: type[Spec] = Experiment, at: str = "") -> type[Spec] | None:
    """Class or family of the members of the tuple at a path; None if there is no tuple of specs."""
    for name, field in declared(cls).items():
        where, spec = join(at, name), spec_in(field.type)
        if path != where and not path.startswith(f"{where}."):
            continue
        items = spec_items(field.type)
        if items is not None:
            if path == where:
                return items
            where, spec = join(where, path.removeprefix(f"{where}.").partition(".")[0]), items
        member = None if spec is None else member_of(spec, texts.get(join(where, "type"), NONE))
        return None if member is None else items_at(texts, path, member, where)
    return None


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
    return _literal(text, kind, path, problems)


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


def spec_items(annotation: Any) -> type[Spec] | None:
    """Spec class of the members of a variable-length tuple; None for other types."""
    items = items_of(annotation)
    return None if items is None else spec_in(items)


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
        spec, items = spec_in(field.type), spec_items(field.type)
        if items is not None and (where in texts or field.default is attrs.NOTHING):
            found[where] = texts.get(where, "0")
            for index in range(item_count(texts, where) or 0):
                found |= _completed_node(texts, items, join(where, str(index)), depth)
            continue
        if spec is None and items is None:
            if where in texts:
                found[where] = texts[where]
            else:
                found[where] = "" if field.default is attrs.NOTHING else written(field.default, field.type)
            continue
        if spec is None or (join(where, "type") not in texts and field.default is not attrs.NOTHING):
            found |= _texts(field.default, field.type, where)
        else:
            found |= _completed_node(texts, spec, where, depth)
    return found


def _completed_node(texts: Mapping[str, str], spec: type[Spec], path: str, depth: int) -> dict[str, str]:
    member = member_of(spec, texts.get(join(path, "type"), NONE))
    if member is None or depth >= DEEPEST:
        return {join(path, "type"): NONE}
    return completed(texts, member, path, depth + 1)
