"""A form for any spec class, from its fields, types, ranges and docstrings; texts of its inputs back to a tree.

Knows no experiment by name but for the order of its parts. A form's state is one text for each path: `objective.beta`
is "0.1", `objective.type` is "DPO", `evaluation.type` is "" where there is none.
"""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Mapping
from typing import Any, cast

import attrs

from nnxdsl.spec.base import Spec, declared, is_family, members
from nnxdsl.spec.docs import field_docs, summary
from nnxdsl.spec.errors import Problem, SpecError, join
from nnxdsl.spec.experiment import Experiment
from nnxdsl.spec.kinds import arms, type_name
from nnxdsl.spec.limits import Limit
from nnxdsl.spec.source import render
from nnxdsl.spec.tree import from_dict

from .html import Child, Html, tag
from .html import join as joined

NONE = ""
"""The type's text where a field holds None."""

DEEPEST = 12
LONGEST = 20_000
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Run", ("name", "steps", "batch_size", "seed", "notes")),
    ("Model", ("model",)),
    ("Data", ("data", "batching")),
    ("Objective", ("objective", "reference")),
    ("Adapter", ("adapter",)),
    ("Quantization and precision", ("quantization", "precision")),
    ("Optimizer and schedule", ("optimizer",)),
    ("Mesh and memory", ("mesh", "microbatch_size", "memory")),
    ("Evaluation", ("evaluation",)),
    ("Checkpoints", ("checkpoint",)),
)
CLOSED = ("Quantization and precision", "Mesh and memory", "Checkpoints", "More")


# an object as texts


def texts_of(value: Spec, path: str = "") -> dict[str, str]:
    """What a form that shows `value` holds."""
    found = {join(path, "type"): value.tag}
    for name, field in declared(type(value)).items():
        found |= _texts(getattr(value, name), field.type, join(path, name))
    return found


def _texts(value: object, annotation: Any, path: str) -> dict[str, str]:
    spec = _spec_in(annotation)
    if spec is not None:
        return {join(path, "type"): NONE} if value is None else texts_of(cast("Spec", value), path)
    return {path: written(value, annotation)}


def written(value: object, annotation: Any) -> str:
    """One plain value as its input shows it; None is nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        if not value:
            return ""
        kind = _items(annotation)
        if kind is str and all("\n" not in item and item.strip() for item in value) and not value[0].startswith("("):
            return "\n".join(value)
        if typing.get_origin(kind) is typing.Literal:
            return ", ".join(map(str, value))
    return render(value)


# texts as an object


def read(texts: Mapping[str, str]) -> tuple[Experiment | None, list[Problem]]:
    """The experiment of a form, or all that is wrong with it; only fields that there are can be set."""
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
        spec = _spec_in(field.type)
        if spec is None:
            if where in texts:
                value = _parsed(texts[where], field.type, where, problems)
                if value is not _MISSING:
                    found[name] = value
            continue
        chosen = texts.get(join(where, "type"))
        if chosen is None:
            continue
        member = member_of(spec, chosen)
        if chosen == NONE:
            if _is_optional(field.type):
                found[name] = None
        elif member is None:
            problems.append(Problem(where, f"there is no {chosen[:40]!r} here"))
        elif depth < DEEPEST:
            found[name] = {"type": member.tag, **_tree(member, texts, where, problems, depth + 1)}
    return found


_MISSING = object()


def _parsed(text: str, annotation: Any, path: str, problems: list[Problem]) -> Any:
    """A text as JSON holds the value; what it cannot be is a problem."""
    if len(text) > LONGEST:
        problems.append(Problem(path, f"{len(text):,} characters; at most {LONGEST:,}"))
        return _MISSING
    kinds, optional = [arm for arm in arms(annotation) if arm is not types.NoneType], _is_optional(annotation)
    kind = kinds[0]
    if kind is bool:
        return text == "true"
    if text.strip() == "" and kind is not str and typing.get_origin(kind) is not tuple:
        if optional:
            return None
        problems.append(Problem(path, "needs a value"))
        return _MISSING
    if kind is str and len(kinds) == 1:
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
    items = _items(kind)
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


def member_of(spec: type[Spec], name: str) -> type[Spec] | None:
    """The class that a choice means."""
    choices = members(spec) if is_family(spec) else {spec.__name__: spec}
    return choices.get(name)


def _spec_in(annotation: Any) -> type[Spec] | None:
    return next((arm for arm in arms(annotation) if isinstance(arm, type) and issubclass(arm, Spec)), None)


def _is_optional(annotation: Any) -> bool:
    return types.NoneType in arms(annotation)


def _items(annotation: Any) -> Any:
    """What a tuple of any length holds; None for others."""
    for arm in arms(annotation):
        given = typing.get_args(arm)
        if typing.get_origin(arm) is tuple and len(given) == 2 and given[1] is Ellipsis:
            return given[0]
    return None


def completed(texts: Mapping[str, str], cls: type[Spec] = Experiment, path: str = "", depth: int = 0) -> dict[str, str]:
    """The texts with defaults for what a newly chosen class has and they lack, and without what it has not."""
    found: dict[str, str] = {join(path, "type"): cls.tag}
    for name, field in declared(cls).items():
        where = join(path, name)
        spec = _spec_in(field.type)
        if spec is None:
            if where in texts:
                found[where] = texts[where]
            else:
                found[where] = "" if field.default is attrs.NOTHING else written(field.default, field.type)
            continue
        chosen = texts.get(join(where, "type"))
        if chosen is None and field.default is not attrs.NOTHING:
            found |= _texts(field.default, field.type, where)
            continue
        member = member_of(spec, chosen or "")
        if member is None or depth >= DEEPEST:
            found[join(where, "type")] = NONE
        else:
            found |= completed(texts, member, where, depth + 1)
    return found


# the form


@attrs.frozen
class Look:
    """What a form shows beside its texts: those that it began with."""

    texts: Mapping[str, str]
    base: Mapping[str, str]


def rendered(texts: Mapping[str, str], base: Mapping[str, str], do: str) -> Html:
    """The form of an experiment; `do` is the action that hears of each change."""
    look = Look(texts, base)
    fields = declared(Experiment)
    docs = field_docs(Experiment)
    placed = {name for _, names in GROUPS for name in names}
    groups = [*GROUPS, ("More", tuple(name for name in fields if name not in placed))]
    parts: list[Html] = []
    for title, names in groups:
        here = [name for name in names if name in fields]
        if not here:
            continue
        inside = [_field(look, name, fields[name], docs.get(name, ""), 0) for name in here]
        changed = any(_differs(look, name) for name in here)
        parts.append(
            tag(
                "details",
                tag("summary", title, tag("span", _gist(look, here), cls="gist muted")),
                tag("div", inside, cls="fields"),
                cls="panel group",
                id=f"g-{title.lower().replace(' ', '-')}",
                open=title not in CLOSED or changed,
            )
        )
    return tag(
        "form", parts, cls="spec-form", id="spec-form", data_do=do, data_live=True, novalidate=True, autocomplete="off"
    )


def _differs(look: Look, path: str) -> bool:
    mine = {name: text for name, text in look.texts.items() if name == path or name.startswith(f"{path}.")}
    theirs = {name: text for name, text in look.base.items() if name == path or name.startswith(f"{path}.")}
    return mine != theirs


def _gist(look: Look, names: list[str]) -> str:
    """What a closed group says of itself."""
    said = [look.texts[f"{name}.type"] or "none" for name in names if f"{name}.type" in look.texts]
    if look.texts.get("model.size") and "model" in names:
        said.append(look.texts["model.size"])
    return " · ".join(dict.fromkeys(said))


def _field(look: Look, path: str, field: Any, doc: str, depth: int) -> Html:
    spec = _spec_in(field.type)
    if spec is not None:
        return _nested(look, path, field, spec, doc, depth)
    name = path.rpartition(".")[2]
    required = field.default is attrs.NOTHING
    hints = [_range(field), "" if required or name == "notes" else f"default {_shown(field.default)}"]
    help_ = tag(
        "span",
        doc,
        " " if doc else "",
        tag("span", ", ".join(filter(None, hints))),
        cls="help",
        id=f"h-{path}",
    )
    changed = look.texts.get(path, "") != look.base.get(path, "")
    return tag(
        "div",
        tag(
            "label",
            name.replace("_", " "),
            tag("span", " *", title="needed", aria_hidden="true") if required else None,
            for_=f"f-{path}",
        ),
        _input(look, path, field, required),
        help_,
        tag("span", cls="field-problem", id=f"p-{path}", hidden=True),
        cls=f"field{' changed' if changed else ''}",
        data_path=path,
    )


def _shown(default: object) -> str:
    if default is None:
        return "none"
    return render(default) if default != () else "none"


def _range(field: Any) -> str:
    return field.check.describe().removeprefix("a value ") if isinstance(field.check, Limit) else ""


def _input(look: Look, path: str, field: Any, required: bool) -> Html:
    value = look.texts.get(path, "")
    common: dict[str, Any] = {
        "id": f"f-{path}",
        "name": path,
        "data_base": look.base.get(path, ""),
        "aria_describedby": f"h-{path} p-{path}",
        "aria_required": "true" if required else None,
    }
    kinds = [arm for arm in arms(field.type) if arm is not types.NoneType]
    kind, optional = kinds[0], _is_optional(field.type)
    if kind is bool:
        return tag("input", type="checkbox", checked=value == "true", **common)
    if typing.get_origin(kind) is typing.Literal and len(kinds) == 1:
        choices = [str(choice) for choice in typing.get_args(kind)]
        options: list[Child] = [tag("option", "none", value="", selected=value == "")] if optional else []
        if value not in choices and not optional:
            options.append(tag("option", f"{value} (?)" if value else "choose ...", value=value, selected=True))
        options += [tag("option", choice, value=choice, selected=choice == value) for choice in choices]
        return tag("select", options, **common)
    if path.endswith("notes") or typing.get_origin(kind) is tuple:
        lines = min(8, max(2, value.count("\n") + 1))
        hint = "one a line" if _items(field.type) is str else "none" if optional else None if kind is str else "()"
        return tag("textarea", f"\n{value}", rows=lines, placeholder=hint, spellcheck="false", **common)
    mode = "numeric" if kind is int else "decimal" if kind is float else None
    return tag(
        "input",
        type="text",
        value=value,
        inputmode=mode,
        placeholder="none" if optional else None,
        spellcheck="false",
        **common,
    )


def _nested(look: Look, path: str, field: Any, spec: type[Spec], doc: str, depth: int) -> Html:
    chosen = look.texts.get(f"{path}.type", NONE)
    member = member_of(spec, chosen)
    name = path.rpartition(".")[2].replace("_", " ")
    optional, choices = _is_optional(field.type), list(members(spec)) if is_family(spec) else [spec.__name__]
    chooser: Html | None = None
    type_path = f"{path}.type"
    if optional or len(choices) > 1:
        options: list[Child] = []
        if optional:
            options.append(tag("option", "none", value=NONE, selected=chosen == NONE))
        elif chosen not in choices:
            options.append(tag("option", "choose ...", value=NONE, selected=True))
        options += [tag("option", choice, value=choice, selected=choice == chosen) for choice in choices]
        chooser = tag(
            "select",
            options,
            id=f"f-{path}",
            name=type_path,
            data_base=look.base.get(type_path, NONE),
            data_shapes=True,
            aria_describedby=f"h-{path} p-{path}",
        )
    else:
        chooser = tag("input", type="hidden", name=type_path, value=chosen)
    about = summary(member) if member is not None and is_family(spec) else doc
    changed = look.texts.get(type_path, NONE) != look.base.get(type_path, NONE)
    inner = ""
    if member is not None:
        docs = field_docs(member)
        inner = joined(
            *[
                _field(look, f"{path}.{one}", inside, docs.get(one, ""), depth + 1)
                for one, inside in declared(member).items()
            ]
        )
    if issubclass(spec, Experiment) and member is not None:
        inner = tag(
            "details",
            tag("summary", f"The earlier experiment: {look.texts.get(f'{path}.name', '')}"),
            tag("div", inner, cls="fields"),
            id=f"n-{path}",
        )
    has_label = optional or len(choices) > 1
    return tag(
        "div",
        tag(
            "div",
            tag("label", name, for_=f"f-{path}") if has_label else tag("span", name, cls="label"),
            chooser,
            tag("span", about, cls="help", id=f"h-{path}"),
            tag("span", cls="field-problem", id=f"p-{path}", hidden=True),
            cls=f"field choice{' changed' if changed else ''}",
            data_path=path,
        ),
        tag("div", inner, cls="fields inner") if inner else None,
        cls="nested",
    )
