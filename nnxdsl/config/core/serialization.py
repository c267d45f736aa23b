"""Specs as trees of plain values: the one mechanism behind JSON, `evolve`, `diff`, sweeps and the command line.

A path is dotted: `objective.beta`, `evaluation.prompts.0`.
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from nnxdsl.config.core.base import (
    BROKEN,
    Spec,
    assemble,
    declared,
    describe,
    field_types,
    is_family,
    members,
    members_hint,
    registry,
    require_importable,
    third_party,
)
from nnxdsl.config.core.fields import as_pairs, of_each, show, union_members
from nnxdsl.config.core.imports import import_name, require_allowed
from nnxdsl.config.core.json_object import JsonObject
from nnxdsl.config.core.run_id import SCHEMA
from nnxdsl.config.core.strict_json import is_nested_beyond, unique_keys
from nnxdsl.errors import Problem, SpecError, join, suggest

MAX_DEPTH = 59
"""Levels of a tree that is read; each stage of `Weights.From` takes three."""

SpecT = TypeVar("SpecT", bound=Spec)

if TYPE_CHECKING:
    import cattrs


def to_dict(spec: Spec) -> dict[str, Any]:
    """The tree as JSON values, every node with its `type`; an experiment carries the schema's number on top.

    Raises:
        SpecError: if the class of a node could not be imported again by whoever reads the tree.
    """
    tree = _encode(spec)
    return {"schema": SCHEMA, **tree} if tree["type"] == "Experiment" else tree


def to_json(spec: Spec) -> str:
    """`to_dict` as indented JSON text."""
    return json.dumps(to_dict(spec), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_dict(tree: Mapping[str, Any], expected: type[SpecT] = Spec) -> SpecT:
    """The object of a tree.

    A tree is data: classes and functions of other packages that it names are imported only where that is allowed; see
    `nnxdsl.allow_imports`. Classes that are defined already need no import.

    Args:
        tree: What `to_dict` gave, or the same read from JSON.
        expected: The class or family that it must be of; needed where two families have a member of the same name.

    Raises:
        SpecError: with every problem of the whole tree, each with its path.
    """
    problems: list[Problem] = []
    nodes = dict(tree)
    schema = nodes.pop("schema", SCHEMA)
    if type(schema) is not int or schema != SCHEMA:
        problems.append(Problem("schema", f"this nnxdsl reads schema {SCHEMA}, got {show(schema)}"))
    if is_nested_beyond(nodes, MAX_DEPTH):
        raise SpecError([Problem("", f"is nested too deeply; at most {MAX_DEPTH} levels are read")])
    built = _decode_node(nodes, expected, problems)
    if problems:
        raise SpecError(problems, _heading(nodes, expected))
    require_allowed(built, _heading(nodes, expected))
    return cast("SpecT", built)


def from_json(text: str, expected: type[SpecT] = Spec) -> SpecT:
    """The object of a JSON text; arguments and errors as in `from_dict`."""
    try:
        tree: object = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise SpecError([Problem("", f"not JSON: {error}")]) from error
    if not isinstance(tree, dict):
        raise SpecError([Problem("", f"expected a JSON object, got {show(tree)}")])
    return from_dict(cast("dict[str, Any]", tree), expected)


def flatten(spec: Spec) -> dict[str, object]:
    """Every leaf of the tree by its path; the types of nodes are under `<path>.type`."""
    return dict(_leaves(spec, ""))


def get(spec: Spec, path: str) -> object:
    """The value at a dotted path.

    Raises:
        SpecError: if there is none, with the nearest name.
    """
    value: object = spec
    for part in path.split("."):
        inside = _children(value)
        if part not in inside:
            raise SpecError([Problem(path, f"{_no_such(value, part)}{suggest(part, inside)}")], _called(spec))
        value = inside[part]
    return value


def evolve(spec: SpecT, changes: Mapping[str, object]) -> SpecT:
    """A copy with the values at some paths replaced; everything else is shared with the original.

    Raises:
        SpecError: with every problem of all changes together.
    """
    problems: list[Problem] = []
    built = _rebuild(spec, _as_tree(changes, problems), problems)
    if problems:
        raise SpecError(problems, _called(spec))
    return cast("SpecT", built)


def diff(old: Spec, new: Spec) -> dict[str, object]:
    """The changes that make the old object equal to the new one, which is what `evolve` then does.

    Raises:
        SpecError: if the two are of different classes.
    """
    if type(old) is not type(new):
        raise SpecError([Problem("", f"{show(old)} and {show(new)} are of different types")])
    return dict(_changes(old, new, ""))


def _called(spec: Spec) -> str:
    return describe(type(spec), attrs.asdict(spec, recurse=False))


def _encode(spec: Spec) -> dict[str, Any]:
    require_importable(type(spec))
    return {"type": spec.tag, **{name: _encode_value(child) for name, child in _children(spec).items()}}


def _encode_value(value: object) -> Any:
    if isinstance(value, Spec):
        return _encode(value)
    if isinstance(value, JsonObject):
        return value.as_dict()
    return [_encode_value(item) for item in cast("tuple[object, ...]", value)] if isinstance(value, tuple) else value


def _is_spec(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, Spec)


@functools.cache
def converter() -> cattrs.Converter:
    """For attrs classes that hold specs: `converter().unstructure(x)`, `converter().structure(tree, X)`."""
    import cattrs  # noqa: PLC0415 - a fifth of the package's import time

    made = cattrs.Converter()
    made.register_unstructure_hook_func(_is_spec, _encode)
    made.register_unstructure_hook(tuple, lambda items: [made.unstructure(item) for item in items])
    # The same reader as for whole trees: it reports all problems together.
    made.register_structure_hook_func(_is_spec, lambda tree, cls: from_dict(tree, cls))
    return made


def _heading(tree: Mapping[str, Any], expected: type[Spec]) -> str:
    candidates = _candidates(expected).get(cast("str", tree.get("type"))) if isinstance(tree.get("type"), str) else None
    cls = candidates[0] if candidates and len(candidates) == 1 else expected
    return "" if cls is Spec else describe(cls, tree)


def _decode(value: Any, annotation: Any, problems: list[Problem]) -> Any:
    """JSON values as the annotation holds them: lists become tuples, tagged objects become specs.

    Values of the wrong kind pass through unchanged: the class of the field reports what is wrong.
    """
    if isinstance(value, Mapping):
        nodes, expected = cast("Mapping[str, Any]", value), _spec_in(annotation)
        return nodes if expected is None else _decode_node(nodes, expected, problems)
    if isinstance(value, list):
        return _decode_list(cast("list[Any]", value), annotation, problems)
    return value


def _spec_in(annotation: Any) -> type[Spec] | None:
    """The class or family among the alternatives of an annotation."""
    return next((arm for arm in union_members(annotation) if _is_spec(arm)), None)


def _decode_list(items: list[Any], annotation: Any, problems: list[Problem]) -> Any:
    tuples = [typing.get_args(arm) for arm in union_members(annotation) if typing.get_origin(arm) is tuple]
    if not tuples:
        return items
    decoded: list[Any] = []
    item_types = of_each(tuples[0], len(items)) or [Any] * len(items)
    for index, (item, item_type) in enumerate(zip(items, item_types, strict=True)):
        inner: list[Problem] = []
        decoded.append(_decode(item, item_type, inner))
        problems += [problem.under(str(index)) for problem in inner]
    return BROKEN if any(item is BROKEN for item in decoded) else tuple(decoded)


def _decode_node(tree: Mapping[str, Any], expected: type[Spec], problems: list[Problem]) -> Any:
    if "type" not in tree:
        choices = f"one of {', '.join(_candidates(expected))}" if is_family(expected) else f"{expected.tag!r}"
        problems.append(Problem("", "needs a 'type'" + (f": {choices}" if expected is not Spec else "")))
        return BROKEN
    cls = _lookup(tree["type"], expected, problems)
    if cls is None:
        return BROKEN
    hints = field_types(cls)
    values: dict[str, Any] = {}
    for name, item in tree.items():
        if name != "type":
            inner: list[Problem] = []
            values[name] = _decode(item, hints.get(name, Any), inner)
            problems += [problem.under(name) for problem in inner]
    return assemble(cls, values, problems)


def _candidates(expected: type[Spec]) -> dict[str, list[type[Spec]]]:
    """The built-in classes that are valid where `expected` is required, by tag, and by the one that they had before."""
    usable = members(expected).values() if expected is not Spec else registry.values()
    tags: dict[str, list[type[Spec]]] = {}
    for cls in [*usable] or [expected]:
        if not is_family(cls):
            for tag in filter(None, (cls.tag, cls.earlier_tag)):
                tags.setdefault(tag, []).append(cls)
    return tags


def _lookup(tag: object, expected: type[Spec], problems: list[Problem]) -> type[Spec] | None:
    """The class of a `type` tag, looked up when it is read, so that classes defined later are found."""
    if not isinstance(tag, str):
        problems.append(Problem("type", f"expected str, got {show(tag)}"))
        return None
    try:
        cls = _imported(tag) if ":" in tag else _among(tag, expected)
    except ValueError as error:
        problems.append(Problem("", str(error)))
        return None
    if not issubclass(cls, expected):
        problems.append(Problem("", f"expected {expected.__qualname__}, got {cls.__qualname__}"))
        return None
    return cls


def _among(tag: str, expected: type[Spec]) -> type[Spec]:
    candidates = _candidates(expected)
    if tag not in candidates:
        what = "there is no type" if expected is Spec else f"{expected.__qualname__} has no member"
        if expected is not Spec and not is_family(expected):
            raise ValueError(f"expected type '{expected.tag}', got '{tag}'")
        raise ValueError(f"{what} '{tag}'{suggest(tag, candidates)}")
    if len(candidates[tag]) > 1:
        names = " or ".join(sorted(cls.__qualname__ for cls in candidates[tag]))
        raise ValueError(f"type '{tag}' alone may be {names}; pass the family as `expected`")
    return candidates[tag][0]


def _imported(tag: str) -> type[Spec]:
    module, _, name = tag.partition(":")
    builtin = next((cls for cls in registry.values() if (cls.__module__, cls.__name__) == (module, name)), None)
    if builtin is not None:
        raise ValueError(f"type '{tag}' is written '{builtin.tag}'")
    cls = third_party.get(tag) or import_name(tag)
    if not (isinstance(cls, type) and issubclass(cls, Spec)):
        raise ValueError(f"type '{tag}' is not a spec class")
    return cls


def origins(spec: Spec) -> dict[str, str]:
    """What each leaf of `flatten` follows from: "default", "by objective and adapter" and so on; "" where it is given.

    A value that is given and equal to the default, or to what is derived, counts as that: the objects are equal.
    """
    return {"type": "", **dict(_origins(spec, "", ""))}


def _origins(value: object, path: str, origin: str) -> Iterator[tuple[str, str]]:
    fields = declared(type(value)) if isinstance(value, Spec) else {}
    rules: Mapping[str, str] = value.derived if isinstance(value, Spec) else {}
    derived = derived_fields(value)
    for name, child in _children(value).items():
        child_origin = origin
        if name in fields and not origin:
            is_default = child == fields[name].default
            child_origin = "default" if is_default else f"by {rules[name]}" if name in derived else ""
        if isinstance(child, Spec):
            yield join(path, f"{name}.type"), child_origin
        if isinstance(child, Spec) or _holds_specs(child):
            yield from _origins(child, join(path, name), child_origin)
        else:
            yield join(path, name), child_origin


def derived_fields(value: object) -> set[str]:
    """The fields of a spec that hold what follows from its other fields: they follow those when they are changed."""
    if not isinstance(value, Spec):
        return set()
    held = _children(value)
    return {name for name, derived in type(value).derived_defaults(held).items() if held[name] == derived}


def _children(value: object) -> dict[str, object]:
    if isinstance(value, Spec):
        return {name: getattr(value, name) for name in declared(type(value))}
    if isinstance(value, tuple):
        return {str(index): item for index, item in enumerate(cast("tuple[object, ...]", value))}
    return {}


def _holds_specs(value: object) -> bool:
    """Whether it is a tuple whose items have paths of their own in flattened trees and diffs."""
    return isinstance(value, tuple) and any(isinstance(item, Spec) for item in cast("tuple[object, ...]", value))


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Spec):
        yield join(path, "type"), value.tag
    if isinstance(value, Spec) or _holds_specs(value):
        for name, child in _children(value).items():
            yield from _leaves(child, join(path, name))
    else:
        yield path, value


def _changes(old: object, new: object, path: str) -> Iterator[tuple[str, object]]:
    if old == new:
        return
    left, right = _children(old), _children(new)
    alike = type(old) is type(new) and left.keys() == right.keys()
    if alike and (isinstance(old, Spec) or _holds_specs(old)):
        for name, child in left.items():
            if name in derived_fields(old) and child == right[name] and name not in derived_fields(new):
                yield join(path, name), child  # `evolve` would have it follow from what changes beside it
            else:
                yield from _changes(child, right[name], join(path, name))
    else:
        yield path, new


@attrs.frozen
class _Leaf:
    value: object


def _as_tree(changes: Mapping[str, object], problems: list[Problem]) -> dict[str, Any]:
    """`{"a.b": 1, "a.c": 2}` as `{"a": {"b": leaf, "c": leaf}}`."""
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        *parents, last = path.split(".")
        prefixes = [".".join(parents[:count]) for count in range(1, len(parents) + 1)]
        whole = next((prefix for prefix in prefixes if prefix in changes), None)
        if whole is not None:
            problems.append(Problem(path, f"is changed, and so is '{whole}' as a whole; put both into one value"))
            continue
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = _Leaf(value)
    return tree


def _rebuild(old: object, changes: dict[str, Any], problems: list[Problem], held_by: Any = None) -> Any:
    """`old` with changes inside it; `held_by` is the annotation of the field that holds it."""
    if not changes:
        return old
    inside = _children(old)
    values = {name: value for name, value in inside.items() if name in changes or name not in derived_fields(old)}
    for name, change in changes.items():
        inner: list[Problem] = []
        annotation = field_types(type(old)).get(name) if isinstance(old, Spec) else None
        if isinstance(change, _Leaf):
            values[name] = as_pairs(change.value, annotation)
        elif name in inside:
            values[name] = _rebuild(inside[name], change, inner, annotation)
        else:
            values[name] = BROKEN
        problems += [problem.under(name) for problem in inner]
    if isinstance(old, Spec):
        return assemble(type(old), values, problems)
    if inside and values.keys() == inside.keys():
        return BROKEN if BROKEN in values.values() else tuple(values.values())
    remedy = _whole(held_by) if old is None else ""
    problems += [Problem(name, f"{_no_such(old, name)}{remedy}") for name in changes if name not in inside]
    return BROKEN


def _no_such(value: object, name: str) -> str:
    items = _children(value)
    if items and not isinstance(value, Spec):
        return f"there is no item '{name}' among {len(items)}"
    return f"{show(value)} has no field '{name}'"


def _whole(annotation: Any) -> str:
    """What to set a field to first, where a change goes into a field that is None."""
    spec = _spec_in(annotation)
    if spec is None:
        return ""
    written = members_hint(spec) if is_family(spec) else spec.__qualname__
    return f"; set the whole object first: {written}"


__all__ = [
    "diff",
    "evolve",
    "flatten",
    "from_dict",
    "from_json",
    "get",
    "origins",
    "to_dict",
    "to_json",
]
