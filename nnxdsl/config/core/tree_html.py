"""A spec as an HTML tree for notebooks: what differs from the defaults first and bold, the defaults folded."""

from __future__ import annotations

import html

import attrs

from nnxdsl.config.core.base import Spec, declared, describe
from nnxdsl.config.core.codegen import render


def page(spec: Spec) -> str:
    """The tree of an object and of all objects in it; every text is escaped."""
    title = describe(type(spec), {name: getattr(spec, name) for name in declared(type(spec))})
    return f'<div style="font-family:monospace">{_node(html.escape(title), spec, is_open=True)}</div>'


def _node(title: str, spec: Spec, *, is_open: bool) -> str:
    """An object as a summary that unfolds to its fields."""
    cls, fields = type(spec), declared(type(spec))
    values = {name: getattr(spec, name) for name in fields}
    defaults = {name: field.default for name, field in fields.items()} | dict(cls.derived_defaults(values))
    changed = [name for name in fields if defaults[name] is attrs.NOTHING or defaults[name] != values[name]]
    same = [name for name in fields if name not in changed]
    body = "".join(_line(f"<b>{html.escape(name)}</b>", values[name], is_open=True) for name in changed)
    if same:
        lines = "".join(_line(html.escape(name), values[name], is_open=False) for name in same)
        body += f"<details><summary><i>{len(same)} unchanged</i></summary>{lines}</details>"
    start = "<details open>" if is_open else "<details>"
    return f'{start}<summary>{title}</summary><div style="margin-left:1.5em">{body}</div></details>'


def _line(name: str, value: object, *, is_open: bool) -> str:
    if isinstance(value, Spec) and declared(type(value)):
        return _node(f"{name} = {html.escape(type(value).__qualname__)}", value, is_open=is_open)
    return f"<div>{name} = {html.escape(render(value))}</div>"
