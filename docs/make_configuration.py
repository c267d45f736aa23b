"""Writes docs/reference/configuration.md: every class of an experiment with its fields, from the classes' docstrings.

`python docs/make_configuration.py`; tests/test_docs.py compares the page with what this makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import attrs

import nnxdsl
from nnxdsl.config.core.base import Spec, declared, is_family, members
from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.docstrings import field_docs, summary

PAGE = Path(__file__).parent / "reference" / "configuration.md"

INTRODUCTION = """# Configuration

Every class that an experiment is composed of, with its fields, types and defaults. This page is generated from the
classes' docstrings by `python docs/make_configuration.py`.
"""


def page() -> str:
    """The page's text: classes without members first, then families, each in alphabetical order."""
    public = {name: getattr(nnxdsl, name) for name in nnxdsl.__all__}
    specs = {name: cls for name, cls in public.items() if isinstance(cls, type) and issubclass(cls, Spec)}
    families = {name: cls for name, cls in specs.items() if is_family(cls)}
    alone = {name: cls for name, cls in specs.items() if name not in families}
    parts = [INTRODUCTION]
    parts += [_section(name, alone[name]) for name in sorted(alone, key=lambda name: (name != "Experiment", name))]
    for name in sorted(families):
        parts.append(f"## {name}\n\n{summary(families[name])}\n")
        parts += [_section(f"{name}.{tag}", cls, "###") for tag, cls in sorted(members(families[name]).items())]
    return "\n".join(parts)


def _section(name: str, cls: type[Spec], level: str = "##") -> str:
    rows = list(_rows(cls))
    table = "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows])
    return f"{level} {name}\n\n{summary(cls)}\n" + (f"\n{table}\n" if rows else "")


def _rows(cls: type[Spec]) -> Iterator[str]:
    texts = field_docs(cls)
    for name, field in declared(cls).items():
        cells = (f"`{name}`", f"`{_type(field.type)}`", _default(cls, name, field), texts.get(name, ""))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Union:  # of a Literal and another type
        return " | ".join("None" if arm is type(None) else _type(arm) for arm in get_args(annotation))
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__qualname__", str(annotation))
    return re.sub(r"\b(?:nnxdsl|typing|collections)(?:\.\w+)*\.(?=\w)", "", text)


def _default(cls: type[Spec], name: str, field: Any) -> str:
    if name in cls.derived:
        return f"by {cls.derived[name]}"
    if field.default is attrs.NOTHING:
        return "required"
    value = field.default
    if isinstance(value, attrs.Factory):  # pyright: ignore[reportArgumentType]
        value = value.factory() if not value.takes_self else None
    return f"`{render(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
