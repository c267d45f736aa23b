"""JSON schemas of functions that a model may call, from type hints and docstrings in Google's format.

They are those of `get_json_schema` of transformers; descriptions of parameters may be missing.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^(\w+):\s*$")
_PARAMETER = re.compile(r"^(\w+)(?:\s*\([^()]*\))?:\s*(.*)$")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function or method, as chat templates read it in `tools`.

    Raises:
        ValueError: It has no docstring, or a parameter has no type hint or one that JSON cannot express.
    """
    name, docstring = function.__name__, inspect.getdoc(function)
    if not docstring:
        raise ValueError(f"'{name}' has no docstring; its first lines tell the model what it does")
    sections = _sections(docstring)
    hints, described = typing.get_type_hints(function), _described(sections.get("Args", ""))
    properties, required = dict[str, Any](), list[str]()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self" and "self" not in hints:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"'{name}': a model names its arguments, so '*{parameter.name}' cannot be given")
        if parameter.name not in hints:
            raise ValueError(f"'{name}': the parameter '{parameter.name}' has no type hint")
        properties[parameter.name] = _schema(hints[parameter.name], f"'{name}': the parameter '{parameter.name}'")
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    schema = {"name": name, "description": sections[""], "parameters": parameters}
    returned = {}
    if "return" in hints:
        try:
            returned = _schema(hints["return"], "")
        except ValueError:  # the model never writes it
            returned = {}
    if "return" in hints and (returned or "Returns" in sections):
        schema["return"] = {**returned, **({"description": sections["Returns"]} if "Returns" in sections else {})}
    return {"type": "function", "function": schema}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The schema of the values of a type."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is Literal:
        names = list(dict.fromkeys(_SCALARS[type(value)] for value in arguments))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        members = [_schema(member, where) for member in arguments if member is not type(None)]
        schema = members[0] if len(members) == 1 else _union(members)
        return {**schema, "nullable": True} if type(None) in arguments else schema
    if origin is list:
        return {"type": "array", **({"items": _schema(arguments[0], where)} if arguments else {})}
    if origin is dict:
        return {"type": "object", **({"additionalProperties": _schema(arguments[1], where)} if arguments else {})}
    raise ValueError(
        f"{where} has the type {hint}; of JSON are str, int, float, bool, list, dict, Literal, Any and unions of them"
    )


def _union(members: list[dict[str, Any]]) -> dict[str, Any]:
    if all(member.keys() == {"type"} and isinstance(member["type"], str) for member in members):
        return {"type": sorted({member["type"] for member in members})}
    return {"anyOf": members}


def _sections(docstring: str) -> dict[str, str]:
    """The text of each section of a docstring by its heading; that before the first is under ""."""
    sections, heading = {"": list[str]()}, ""
    for line in docstring.splitlines():
        if match := _SECTION.match(line):
            heading = match[1]
            sections[heading] = []
        else:
            sections[heading].append(line)
    return {name: textwrap.dedent("\n".join(lines)).strip() for name, lines in sections.items()}


def _described(section: str) -> Mapping[str, str]:
    """The description of each parameter in a section `Args`."""
    descriptions, name = dict[str, str](), ""
    for line in filter(str.strip, section.splitlines()):
        if match := _PARAMETER.match(line):
            name, descriptions[match[1]] = match[1], match[2]
        elif name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions
