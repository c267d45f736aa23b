"""Descriptions of fields from docstrings, for forms and `--help`: the Attributes sections, inherited ones too."""

from __future__ import annotations

import inspect
import re

from nnxdsl.config.core.base import Spec, declared

_ITEM = re.compile(r"(?P<name>\w+): (?P<text>.*)")


def field_docs(cls: type[Spec]) -> dict[str, str]:
    """The description of every documented field of `cls`, in the order of its fields; the nearest class wins.

    >>> from nnxdsl import Checkpoint
    >>> field_docs(Checkpoint)["keep"]
    'How many of the newest are kept.'
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _attributes(base.__dict__.get("__doc__") or "")
    return {name: docs[name] for name in declared(cls) if name in docs}


def summary(cls: type[Spec]) -> str:
    """The first paragraph of the class's docstring, in one line.

    >>> from nnxdsl import Mesh
    >>> summary(Mesh)
    'The device mesh: the product of its axes is the number of devices.'
    """
    return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())


def _attributes(docstring: str) -> dict[str, str]:
    """The items of a Google docstring's Attributes section; lines indented deeper continue an item."""
    docs: dict[str, str] = {}
    inside, name = False, ""
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.startswith(" "):
            inside = line == "Attributes:" or (inside and not line)
            continue
        item = _ITEM.fullmatch(line.strip())
        if inside and item is not None and len(line) - len(line.lstrip()) == 4:
            name = item["name"]
            docs[name] = item["text"]
        elif inside and name:
            docs[name] += f" {line.strip()}"
    return docs
