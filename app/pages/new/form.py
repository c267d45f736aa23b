"""Generates an HTML form for any spec class from its fields, types, ranges and docstrings.

Only the order and titles of the groups are specific to `Experiment`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

import attrs

from nnxdsl.config.core.base import Field, Spec, declared, is_family
from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.docstrings import field_docs, summary
from nnxdsl.config.core.fields import arms
from nnxdsl.config.core.validators import Limit
from nnxdsl.config.experiment import Experiment

from ...components.parts import action
from ...html import Child, Html, tag
from ...html import join as joined
from .form_texts import NONE, choices_of, is_optional, item_count, items_of, member_of, spec_in, spec_items

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Run", ("name", "steps", "epochs", "batch_size", "seed", "notes")),
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


@attrs.frozen
class Look:
    """Current and initial texts of a form."""

    texts: Mapping[str, str]
    base: Mapping[str, str]


def rendered(texts: Mapping[str, str], base: Mapping[str, str], do: str) -> Html:
    """Returns the form of an experiment; `do` is the action that is called at each change."""
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
    current = {name: text for name, text in look.texts.items() if name == path or name.startswith(f"{path}.")}
    initial = {name: text for name, text in look.base.items() if name == path or name.startswith(f"{path}.")}
    return current != initial


def _gist(look: Look, names: list[str]) -> str:
    """Summary of a closed group: its types."""
    types = [look.texts[f"{name}.type"] or "none" for name in names if f"{name}.type" in look.texts]
    if look.texts.get("model.size") and "model" in names:
        types.append(look.texts["model.size"])
    return " · ".join(dict.fromkeys(types))


def _field(look: Look, path: str, field: Any, doc: str, depth: int) -> Html:
    spec = spec_in(field.type)
    if spec is not None:
        return _nested(look, path, field, spec, doc, depth)
    items = spec_items(field.type)
    if items is not None:
        return _members(look, path, items, doc, depth)
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
            tag("span", " *", title="required", aria_hidden="true") if required else None,
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
    kind, optional = kinds[0], is_optional(field.type)
    if kind is bool:
        return tag("input", type="checkbox", checked=value == "true", **common)
    if typing.get_origin(kind) is typing.Literal and len(kinds) == 1:
        choices = [str(choice) for choice in typing.get_args(kind)]
        options: list[Child] = [tag("option", "none", value="", selected=value == "")] if optional else []
        if value not in choices and not optional:
            options.append(tag("option", f"{value} (?)" if value else "choose ...", value=value, selected=True))
        options += [tag("option", choice, value=choice, selected=choice == value) for choice in choices]
        return tag("select", options, **common)
    if path.endswith("notes") or any(typing.get_origin(each) is tuple for each in kinds):
        lines = min(8, max(2, value.count("\n") + 1))
        hint = "one a line" if items_of(field.type) is str else "none" if optional else None if kind is str else "()"
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


def _members(look: Look, path: str, spec: type[Spec], doc: str, depth: int) -> Html:
    """Fields of a tuple of specs: those of each member, and buttons to add and remove members."""
    name, text = path.rpartition(".")[2], look.texts.get(path, "")
    changed = (text or "0") != (look.base.get(path, "") or "0")
    item = Field(spec, attrs.NOTHING, None, positional=False)
    parts: list[Html] = []
    for index in range(item_count(look.texts, path) or 0):
        where = f"{path}.{index}"
        remove = action(
            "Remove",
            "new.edit_items",
            "small",
            data_form="spec-form",
            data_path=path,
            data_remove=index,
            aria_label=f"Remove {name} {index + 1}",
        )
        parts.append(joined(_nested(look, where, item, spec, "", depth + 1, f"{name} {index + 1}"), remove))
    add = action("Add", "new.edit_items", "small", data_form="spec-form", data_path=path, aria_label=f"Add to {name}")
    add_id = tag("span", add, id=f"f-{path}", tabindex=-1)
    return tag(
        "div",
        tag(
            "div",
            tag("span", name.replace("_", " "), cls="label"),
            tag("input", type="hidden", name=path, value=text or "0"),
            add_id,
            tag("span", doc, cls="help", id=f"h-{path}"),
            tag("span", cls="field-problem", id=f"p-{path}", hidden=True),
            cls=f"field choice{' changed' if changed else ''}",
            data_path=path,
        ),
        tag("div", parts, cls="fields inner") if parts else None,
        cls="nested",
    )


def _nested(look: Look, path: str, field: Any, spec: type[Spec], doc: str, depth: int, name: str = "") -> Html:
    chosen = look.texts.get(f"{path}.type", NONE)
    member = member_of(spec, chosen)
    name = name or path.rpartition(".")[2].replace("_", " ")
    optional, choices = is_optional(field.type), list(choices_of(spec))
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
