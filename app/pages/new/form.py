"""Generates a form of gradio components for any spec class from its fields, types, ranges and docstrings.

Only the order and titles of the groups are specific to `Experiment`. What is typed stays in the browser's own copy of
all texts (`app/static/form.js`), which is saved as a whole: no component of a form is an input of a function.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import attrs
import gradio as gr
from gradio.components import Component

from nnxdsl.config.core.base import Field, Spec, declared, is_family
from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.docstrings import field_docs, summary
from nnxdsl.config.core.fields import type_name, union_members
from nnxdsl.config.core.json_object import JsonObject
from nnxdsl.config.core.validators import Limit, filled
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import join

from ...view import UNQUEUED
from . import form_texts
from .form_texts import NONE, spec_in

GROUPS: dict[str, tuple[str, ...]] = {
    "Run": ("name", "steps", "epochs", "batch_size", "seed", "notes"),
    "Model": ("model",),
    "Data": ("data", "batching"),
    "Objective": ("objective", "reference"),
    "Adapter": ("adapter",),
    "Quantization and precision": ("quantization", "precision"),
    "Optimizer and schedule": ("optimizer",),
    "Mesh and memory": ("mesh", "microbatch_size", "memory"),
    "Evaluation": ("evaluation",),
    "Checkpoints": ("checkpoint",),
}
NOT_BLANK = filled.describe()
_PLACED = {name for names in GROUPS.values() for name in names}
GROUPS["More"] = tuple(name for name in declared(Experiment) if name not in _PLACED)
OPEN = ("Run", "Model", "Data", "Objective")
"""Groups that are unfolded at first; the components of the others are made when they are unfolded."""


@attrs.frozen
class FormState:
    """What a form shows: texts by path, or those that differ from a base; `form` is the browser's copy of them all."""

    texts: Mapping[str, str]
    base: Mapping[str, str]
    only_changed: bool
    form: gr.Textbox


def differs(texts: Mapping[str, str], base: Mapping[str, str], path: str) -> bool:
    """Whether a field, or a field below it, differs from the base."""

    def below(texts: Mapping[str, str]) -> dict[str, str]:
        return {name: text for name, text in texts.items() if f"{name}.".startswith(f"{path}.")}

    return below(texts) != below(base)


def shape(texts: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """The texts that decide which components a group has: classes, and numbers of members."""
    here = {path: text for path, text in texts.items() if path.partition(".")[0] in names}
    parents = {path.rpartition(".")[0] for path in here}
    return {path: text for path, text in here.items() if path.endswith(".type") or f"{path}.0" in parents}


def classes_of(texts: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Classes of a group, for its title."""
    classes = [texts[f"{name}.type"] or "none" for name in names if f"{name}.type" in texts]
    sizes = [texts["model.size"]] if "model" in names and "model.size" in texts else []
    return " · ".join(dict.fromkeys([*classes, *sizes]))


def draw(state: FormState, cls: type[Spec], path: str = "", names: tuple[str, ...] | None = None) -> None:
    """Adds the components of a class's fields, or of some: plain ones side by side, nested ones below each other."""
    docs, fields = field_docs(cls), declared(cls)
    shown = [
        (join(path, name), fields[name], docs.get(name, ""))
        for name in (fields if names is None else names)
        if not state.only_changed or differs(state.texts, state.base, join(path, name))
    ]
    for is_nested, group in itertools.groupby(shown, key=lambda each: form_texts.is_nested(each[1].type)):
        with contextlib.nullcontext() if is_nested else gr.Row(elem_classes=["fields"]):
            for each in group:
                _field(state, *each)


def _field(state: FormState, path: str, field: Field, doc: str, label: str = "") -> None:
    if spec := spec_in(field.type):
        _nested(state, path, spec, form_texts.is_optional(field.type), doc, label or _label(path))
    elif parts := form_texts.item_parts(field.type):
        _members(state, path, parts, doc)
    else:
        _plain(state, path, field, doc, label or _label(path))


def _nested(state: FormState, path: str, spec: type[Spec], optional: bool, doc: str, label: str) -> None:
    """Adds the choice of a class, if there are several, and the fields of the chosen one."""
    chosen, choices = state.texts.get(f"{path}.type", NONE), form_texts.choices_of(spec)
    member = choices.get(chosen)
    with gr.Column(elem_classes=["nested"]):
        if optional or len(choices) > 1:
            none = [("none" if optional else "choose ...", NONE)] if optional or chosen not in choices else []
            about = summary(member) if member is not None and is_family(spec) else doc
            shown = [*none, *((choice, choice) for choice in choices)]
            chooser = gr.Dropdown(shown, value=chosen, label=label, info=about, **_common(path))
            _keep(state, f"{path}.type", chooser, f", {json.dumps(path)}")  # other fields come
        else:
            _heading(path, label, doc)
        if member is not None and issubclass(spec, Experiment):
            with gr.Accordion(f"The earlier experiment: {state.texts.get(f'{path}.name', '')}", open=False):
                draw(state, member, path)
        elif member is not None:
            draw(state, member, path)


def _members(state: FormState, path: str, parts: form_texts.Parts, doc: str) -> None:
    """Adds the members of a tuple of specs, and buttons that add and remove them."""
    name = _label(path)
    with gr.Column(elem_classes=["nested"]):
        _heading(path, name, doc)
        count = form_texts.item_count(state.texts, path) or 0
        for index, member in enumerate(form_texts.members_at(parts, path, count)):
            label = f"{name} {index + 1}"
            with gr.Column(elem_classes=["member"]):
                for where, part in member:
                    field = Field(part, attrs.NOTHING, None, positional=False)
                    _field(state, where, field, "", f"weight of {label}" if part is float else label)
                remove = gr.Button(f"Remove {label}", size="sm", scale=0, min_width=120)
                _edits(state, remove.click, f"() => nnx.remove({json.dumps(path)}, {index})")
        add = gr.Button(f"Add to {name}", size="sm", scale=0, min_width=120)
        _edits(state, add.click, f"() => nnx.add({json.dumps(path)}, {count})")


def _edits(state: FormState, trigger: Any, script: str, *inputs: Component) -> None:
    """Changes the browser's copy of the texts when something is triggered."""
    trigger(None, list(inputs), [state.form], js=script, **UNQUEUED)


def _keep(state: FormState, path: str, component: Any, more: str = "") -> None:
    """Keeps what is typed or chosen in the browser's copy of the texts."""
    _edits(state, component.change, f"(value) => nnx.edit({json.dumps(path)}, value{more})", component)


def _heading(path: str, label: str, doc: str) -> None:
    gr.Markdown(f"**{label}** {doc}", elem_id=f"f-{path}", elem_classes=["spec-field"])


def _common(path: str) -> dict[str, Any]:
    return {"elem_id": f"f-{path}", "elem_classes": ["spec-field"], "interactive": True, "min_width": 180}


def _label(path: str) -> str:
    return path.rpartition(".")[2].replace("_", " ")


def _plain(state: FormState, path: str, field: Field, doc: str, label: str) -> None:
    default, is_required = field.default, field.default is attrs.NOTHING
    shown = "none" if default is None or default == () else f"`{render(default)}`" if not is_required else ""
    limits = field.check.describe().removeprefix("a value ") if isinstance(field.check, Limit) else ""
    limits = "" if limits == NOT_BLANK else limits  # such fields are marked as required
    hints = [limits, "" if is_required or path == "notes" else f"default {shown}"]
    info = " ".join(filter(None, [doc, ", ".join(filter(None, hints))]))
    named = {"label": f"{label}{' *' if is_required else ''}", "info": info or None, **_common(path)}
    _keep(state, path, _component(field, state.texts.get(path, ""), path, named))


def _component(field: Field, text: str, path: str, named: dict[str, Any]) -> Component:
    """The component of a plain field: type and default to Checkbox, Dropdown, Number or Textbox."""
    kinds = [arm for arm in union_members(field.type) if arm is not types.NoneType]
    optional, kind, items = form_texts.is_optional(field.type), kinds[0], form_texts.items_of(field.type)
    if kind is bool:
        return gr.Checkbox(text == "true", **named)
    if typing.get_origin(kind) is typing.Literal and kinds[1:] in ([], [str]):
        choices = [(str(choice), str(choice)) for choice in typing.get_args(kind)]
        choices = [("none", ""), *choices] if optional else choices
        other = [] if text in (value for _, value in choices) else [(f"{text} (?)" if text else "choose ...", text)]
        return gr.Dropdown([*other, *choices], value=text, allow_custom_value=str in kinds, **named)
    if typing.get_origin(items) is typing.Literal:
        chosen = [word.strip() for word in text.split(",") if word.strip()]
        choices = list(dict.fromkeys([*map(str, typing.get_args(items)), *chosen]))
        return gr.Dropdown(choices, value=chosen, multiselect=True, **named)
    if kind is int and re.fullmatch(r"-?\d{1,15}", text):  # an empty gr.Number shows 0
        return gr.Number(int(text), precision=0, placeholder="none" if optional else " ", **named)
    is_long = path.endswith("notes") or kind is JsonObject or any(typing.get_origin(each) is tuple for each in kinds)
    lines = 2 if is_long else 1
    hint = "name: value, one a line" if form_texts.is_named(field.type) else "one a line" if items is str else ""
    hint = hint or ("none" if optional else type_name(field.type) if is_long and kind is not str else "")
    return gr.Textbox(text, lines=lines, max_lines=8 if is_long or "\n" in text else 1, placeholder=hint, **named)
