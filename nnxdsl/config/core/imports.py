"""Importing by name: the one place where a name in data becomes code, and the rule for which names may.

A spec may name a class or function of another package as `module:name`: in the `type` of a node, or as a reward.
Importing a module runs it, so a name is followed only if the user trusts it: names in objects that their own Python
file builds, and modules allowed by `--allow`, the environment variable `NNXDSL_ALLOW` or `allow_imports`. A name that
arrives as data (JSON, a run directory, a form, a model directory) is never trusted for being there.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

import attrs

from nnxdsl.config.core.base import Spec, declared, is_builtin, third_party
from nnxdsl.errors import Problem, SpecError, join, suggest

T = TypeVar("T")

VARIABLE = "NNXDSL_ALLOW"
"""Allowed names, separated by commas. They are kept only here, so that child processes allow what their parent does."""

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*(\.[^\W\d]\w*)*)?")


def allow_imports(*names: str) -> None:
    """Allows modules to be imported by name in this process and the ones that it starts.

    Args:
        names: Modules such as `my_lab`, with all that is below them, or single names such as `my_lab.rewards:short`.

    Raises:
        SpecError: One is neither.
    """
    wrong = [name for name in names if not _NAME.fullmatch(name)]
    if wrong:
        raise SpecError([Problem("", f"expected a module or module:name to allow, got {name!r}") for name in wrong])
    os.environ[VARIABLE] = ",".join(sorted({*_allowed(), *names}))


def allow_names_in(value: object) -> None:
    """Allows every name that specs of the user's own Python code refer to.

    Args:
        value: A spec, or anything of attrs classes, tuples, lists and mappings that holds specs.
    """
    names = {name for _, name in names_in(value)}
    if names - _allowed():
        allow_imports(*names)


def names_in(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Every `module:name` that an object refers to, with the path where it does.

    Args:
        value: As in `allow_names_in`.
        path: The path of `value` itself.
    """
    if isinstance(value, Spec):
        if not is_builtin(type(value)):
            yield join(path, "type"), value.tag
        yield from ((join(path, field), name) for field, name in value.import_names().items())
        for field in declared(type(value)):
            yield from names_in(getattr(value, field), join(path, field))
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield from names_in(item, join(path, str(key)))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(cast("list[object]", value)):
            yield from names_in(item, join(path, str(index)))
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from names_in(getattr(value, field.name), join(path, field.name))


def refusal(name: str) -> str | None:
    """Why `module:name` may not be imported and how to allow it; None if it may."""
    module, _, _ = name.partition(":")
    parts = module.split(".")
    if not {name, *(".".join(parts[:count]) for count in range(1, len(parts) + 1))}.isdisjoint(_allowed()):
        return None
    return (
        f"'{name}' would import the module '{module}', which is not allowed; if you trust it, allow it with "
        f"--allow {module}, {VARIABLE}={module} or nnxdsl.allow_imports('{module}')"
    )


def require_allowed(spec: Spec, location: str = "") -> None:
    """Refuses an object that came as data and names code to import that is not allowed.

    Classes that this process has defined already are no imports.

    Args:
        spec: The object.
        location: What it is, for the message.

    Raises:
        SpecError: With the path of every such name.
    """
    names = [(path, name) for path, name in names_in(spec) if name not in third_party]
    problems = [Problem(path, message) for path, name in names if (message := refusal(name))]
    if problems:
        raise SpecError(problems, location)


def import_name(name: str) -> object:
    """The object of `module:name`.

    Raises:
        ValueError: The module is not allowed, cannot be imported, or has no such name; the message has the remedy.
    """
    refused = refusal(name)
    if refused is not None:
        raise ValueError(refused)
    module, _, attribute = name.partition(":")
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:  # whatever somebody else's module does when it is imported
        hint = "put it in a module of its own" if module == "__main__" else "is its package installed?"
        raise ValueError(f"'{name}' cannot be imported: {error or type(error).__name__}; {hint}") from error


def find_named(name: str, registered: Mapping[str, T], kind: str, form: str) -> T:
    """What a name stands for: what is registered under it, or else what is imported as `module:name`.

    Args:
        name: The name.
        registered: What the decorator of `nnxdsl` has registered.
        kind: The name of the decorator.
        form: What is imported, for messages.

    Raises:
        ValueError: There is none; the message has the remedy.
    """
    if name in registered:
        return registered[name]
    if ":" in name:
        return cast("T", import_name(name))
    raise ValueError(
        f"no {kind} '{name}' is registered{suggest(name, registered)}; import the file that has "
        f"@nnxdsl.{kind}('{name}'), or write 'module:{form}'"
    )


def _allowed() -> frozenset[str]:
    return frozenset(name for word in os.environ.get(VARIABLE, "").split(",") if (name := word.strip()))
