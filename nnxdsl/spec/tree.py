"""Specs as trees of plain values: the one mechanism behind JSON, `evolve`, `diff`, sweeps and the command line.

A path is dotted: `objective.beta`, `evaluation.prompts.0`.
"""

from __future__ import annotations

import importlib
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import attrs
import cattrs

from nnxdsl.spec.base import (
    Spec,
    assemble,
    describe,
    field_types,
    is_family,
    members,
    members_hint,
    registry,
    show,
)
from nnxdsl.spec.errors import Problem, SpecError, suggest
from nnxdsl.spec.identity import SCHEMA

SpecT = TypeVar("SpecT", bound=Spec)
converter = cattrs.Converter()
"""Where a third party may register hooks for field types of its own."""


def to_dict(spec: Spec) -> dict[str, Any]:
    """The tree as JSON values, every node with its `type`; an experiment carries the schema's number on top."""
    tree = cast("dict[str, Any]", converter.unstructure(spec))
    return {"schema": SCHEMA, **tree} if tree["type"] == "Experiment" else tree


def to_json(spec: Spec) -> str:
    """`to_dict` as indented JSON text."""
    return json.dumps(to_dict(spec), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_dict(tree: Mapping[str, Any], expected: type[SpecT] = Spec) -> SpecT:
    """The object of a tree; `expected` says which class or family it is of, where the tag alone would not.

    Raises:
        SpecError: with every problem of the whole tree, each with its path.
    """
    problems: list[Problem] = []
    tree = dict(tree)
    schema = tree.pop("schema", SCHEMA)
    if schema != SCHEMA:
        problems.append(Problem("schema", f"this nnxdsl reads schema {SCHEMA}, got {schema!r}"))
    built = _decode(tree, expected, "", problems)
    if problems or not isinstance(built, expected):
        raise SpecError(problems, _heading(tree))
    return built


def from_json(text: str, expected: type[SpecT] = Spec) -> SpecT:
    """The object of a JSON text."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError([Problem("", f"not JSON: {error}")]) from error
    if not isinstance(tree, dict):
        raise SpecError([Problem("", f"expected a JSON object, got {show(tree)}")])
    return from_dict(cast("dict[str, Any]", tree), expected)


def flatten(spec: Spec) -> dict[str, object]:
    """Every leaf of the tree by its path; the node types stand under `<path>.type`."""
    return dict(_leaves(spec, ""))


def get(spec: Spec, path: str) -> object:
    """The value at a dotted path.

    Raises:
        SpecError: if there is none, with the nearest name.
    """
    value: object = spec
    done: list[str] = []
    for part in path.split("."):
        try:
            value = _children(value)[part]
        except KeyError:
            where, at = ".".join(done) or type(spec).__name__, _children(value)
            message = f"{show(value)} has no field '{part}'{suggest(part, at)}"
            raise SpecError([Problem(path, message)], where) from None
        done.append(part)
    return value


def evolve(spec: SpecT, changes: Mapping[str, object]) -> SpecT:
    """A copy with the values at some paths replaced; everything else is shared with the original.

    Raises:
        SpecError: with every problem of all changes together.
    """
    problems: list[Problem] = []
    built = _rebuild(spec, _as_tree(changes), "", problems)
    if problems or built is None:
        raise SpecError(problems, describe(type(spec), {"name": getattr(spec, "name", None)}))
    return cast("SpecT", built)


def diff(old: Spec, new: Spec) -> dict[str, object]:
    """The changes that make `old` equal to `new`: `evolve(old, diff(old, new)) == new`."""
    if type(old) is not type(new):
        raise SpecError([Problem("", f"{show(old)} and {show(new)} are of different types")])
    return dict(_changes(old, new, ""))


def _unstructure(spec: Spec) -> dict[str, Any]:
    fields = attrs.fields(type(spec))
    return {"type": spec.tag, **{f.name: converter.unstructure(getattr(spec, f.name)) for f in fields}}


def _structure_factory(cls: type[Spec]) -> Callable[[Any, Any], Spec]:
    return lambda tree, _type: from_dict(tree, cls)


def _is_spec(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, Spec)


converter.register_unstructure_hook_func(_is_spec, _unstructure)
converter.register_unstructure_hook(tuple, lambda items: [converter.unstructure(item) for item in items])
converter.register_structure_hook_factory(_is_spec)(_structure_factory)


def _heading(tree: Mapping[str, Any]) -> str:
    tag = tree.get("type")
    cls = _by_tag().get(tag) if isinstance(tag, str) else None
    return describe(cls, tree) if cls else ""


def _decode(value: Any, annotation: Any, path: str, problems: list[Problem]) -> Any:
    """JSON values as the annotation holds them: lists become tuples, tagged objects become specs.

    Values of the wrong kind pass through unchanged: the class that holds them says what is wrong.
    """
    if isinstance(value, Mapping):
        return _decode_node(cast("Mapping[str, Any]", value), annotation, path, problems)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        arms = _item_types(annotation, len(items))
        return tuple(_decode(item, arm, f"{path}.{i}", problems) for i, (item, arm) in enumerate(zip(items, arms, strict=True)))
    return value


def _decode_node(tree: Mapping[str, Any], annotation: Any, path: str, problems: list[Problem]) -> Any:
    expected = next((arm for arm in _arms(annotation) if _is_spec(arm)), Spec)
    cls = _lookup(tree.get("type"), expected, path, problems)
    if cls is None:
        return _broken
    hints = field_types(cls)
    inner: list[Problem] = []
    values = {
        name: _decode(item, hints.get(name, Any), name, inner) for name, item in tree.items() if name != "type"
    }
    built = _assemble(cls, values, inner)
    problems += [problem.under(path) for problem in inner]
    return built


class _Broken:
    """Stands for a node that could not be built; the reason is already among the problems."""


_broken = _Broken()


def _assemble(cls: type[Spec], values: dict[str, Any], problems: list[Problem]) -> Any:
    broken = {name for name, value in values.items() if value is _broken}
    needed = {f.name for f in attrs.fields(cls) if f.default is attrs.NOTHING}
    kept = {name: value for name, value in values.items() if name not in broken}
    if broken & needed:  # nothing to stand in for it: check the fields that are there and stop
        found: list[Problem] = []
        assemble(cls, kept, found)
        problems += [problem for problem in found if problem.path not in broken]
        return _broken
    built = assemble(cls, kept, problems)
    return _broken if built is None else built


def _lookup(tag: object, expected: type[Spec], path: str, problems: list[Problem]) -> type[Spec] | None:
    """The class of a `type` tag, looked up when it is read, so that classes defined later are found."""
    found: type[Spec] | None = None
    if not isinstance(tag, str):
        problems.append(Problem(path, f"expected an object with a 'type', got 'type': {tag!r}"))
    elif ":" in tag:
        found = _third_party(tag, path, problems)
    else:
        candidates = members(expected) if is_family(expected) else _by_tag()
        found = candidates.get(tag)
        if found is None:
            problems.append(Problem(path, f"{expected.__name__} has no member '{tag}'{suggest(tag, candidates)}"))
    if found is not None and not issubclass(found, expected):
        problems.append(Problem(path, f"expected {expected.__name__}, got {found.__qualname__}"))
        return None
    return found


def _by_tag() -> dict[str, type[Spec]]:
    """Every class that can be built, by tag; where a noun and a member share one, the noun is meant."""
    usable = [cls for cls in registry.values() if not is_family(cls)]
    return {cls.tag: cls for cls in sorted(usable, key=lambda cls: cls.family is cls)}


def _third_party(tag: str, path: str, problems: list[Problem]) -> type[Spec] | None:
    module, _, name = tag.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        problems.append(Problem(path, f"type '{tag}' cannot be imported: {error}; is its package installed?"))
        return None
    if not (isinstance(found, type) and issubclass(found, Spec)):
        problems.append(Problem(path, f"type '{tag}' is not a spec class"))
        return None
    return found


def _arms(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _item_types(annotation: Any, count: int) -> list[Any]:
    for arm in _arms(annotation):
        if typing.get_origin(arm) is tuple:
            args = typing.get_args(arm)
            if len(args) == 2 and args[1] is Ellipsis:
                return [args[0]] * count
            if len(args) == count:
                return list(args)
    return [Any] * count


def _children(value: object) -> dict[str, object]:
    if isinstance(value, Spec):
        return {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
    if isinstance(value, tuple):
        return {str(index): item for index, item in enumerate(cast("tuple[object, ...]", value))}
    return {}


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Spec):
        yield (f"{path}.type" if path else "type"), value.tag
        for name, child in _children(value).items():
            yield from _leaves(child, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _changes(old: object, new: object, path: str) -> Iterator[tuple[str, object]]:
    if old == new:
        return
    if isinstance(old, Spec) and type(old) is type(new):
        theirs = _children(new)
        for name, child in _children(old).items():
            yield from _changes(child, theirs[name], f"{path}.{name}" if path else name)
    else:
        yield path, new


def _as_tree(changes: Mapping[str, object]) -> dict[str, Any]:
    """`{"a.b": 1, "a.c": 2}` as `{"a": {"b": leaf, "c": leaf}}`."""
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        node: dict[str, Any] = tree
        *parents, last = path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if isinstance(node, _Leaf):
                raise SpecError([Problem(path, f"'{part}' is replaced as a whole by another change")])
        if last in node:
            raise SpecError([Problem(path, "is changed twice, or in part and as a whole")])
        node[last] = _Leaf(value)
    return tree


@attrs.frozen
class _Leaf:
    value: object


def _rebuild(old: object, changes: dict[str, Any], path: str, problems: list[Problem]) -> Any:
    if isinstance(old, tuple):
        return _rebuild_tuple(cast("tuple[object, ...]", old), changes, path, problems)
    if not isinstance(old, Spec):
        named = ", ".join(sorted(changes))
        held = show(old)
        problems.append(Problem(path, f"is {held}, which has no field {named}; set it to a whole object first"))
        return _broken
    values = {name: value for name, value in _children(old).items() if name not in changes}
    inner: list[Problem] = []
    for name, change in changes.items():
        if isinstance(change, _Leaf):
            values[name] = change.value
        elif name in _children(old):
            values[name] = _rebuild(getattr(old, name), change, name, inner)
        else:
            values[name] = None  # the class itself says that it has no such field
    built = _assemble(type(old), values, inner)
    problems += [problem.under(path) for problem in inner]
    return built


def _rebuild_tuple(old: tuple[object, ...], changes: dict[str, Any], path: str, problems: list[Problem]) -> Any:
    items = list(old)
    for name, change in changes.items():
        if not name.isdigit() or int(name) >= len(items):
            problems.append(Problem(path, f"has {len(items)} items, none is '{name}'"))
            return _broken
        at = int(name)
        items[at] = change.value if isinstance(change, _Leaf) else _rebuild(items[at], change, f"{path}.{name}", problems)
    return _broken if any(item is _broken for item in items) else tuple(items)


__all__ = [
    "converter",
    "diff",
    "evolve",
    "flatten",
    "from_dict",
    "from_json",
    "get",
    "members_hint",
    "to_dict",
    "to_json",
]
