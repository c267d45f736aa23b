"""Completes verbs, flags, runs and `path=value` arguments in a shell, by argcomplete; runs no file of the user."""

# pyright: reportPrivateUsage=false
# (argparse has no public way to a parser's actions)

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import argcomplete
from argcomplete.completers import FilesCompleter

from nnxdsl.cli.load import load
from nnxdsl.config.core.base import Spec, declared, is_family, members
from nnxdsl.config.core.serialization import flatten
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError
from nnxdsl.runs.run_list import list_runs
from nnxdsl.sharding.hardware import DEVICES


def complete(parser: ArgumentParser) -> None:
    """Answers the shell that has started this process to complete a line, and exits.

    Args:
        parser: The parser of the command line, with all verbs and their arguments.
    """
    assert parser._subparsers is not None
    for verb in parser._subparsers._group_actions[0].choices.values():  # pyright: ignore
        for action in verb._actions:
            if action.dest == "overrides":
                action.completer = _overrides
            elif action.dest == "device":
                action.completer = lambda **_: list(DEVICES)
            elif "RUN" in str(action.metavar):
                action.completer = _runs
    argcomplete.autocomplete(parser)


def _runs(prefix: str, parsed_args: Namespace, **_: object) -> list[str]:
    """Files, and the ids of the runs under `--home`."""
    try:
        runs = [run.id for run in list_runs(parsed_args.home)]
    except NnxdslError:
        runs = []
    return [*runs, *FilesCompleter()(prefix)]


def _overrides(prefix: str, parsed_args: Namespace, **_: object) -> list[str]:
    """`path=` of a run's or a JSON file's own fields; where the target is Python, of all that there are."""
    target = str(parsed_args.target or "")
    paths = {path: list(values) for path, values in settings(Experiment)}
    if target and not target.endswith(".py"):
        try:
            fields = flatten(load(target, parsed_args.home))
            within = {path[:end] for path in fields for end in range(len(path) + 1) if path[end : end + 1] in (".", "")}
            paths = {path: values for path, values in paths.items() if path in within}
        except NnxdslError:
            pass
    path, equals, _value = prefix.partition("=")
    if equals:
        return [f"{path}={value}" for value in paths.get(path, ())]
    level = prefix.count(".")
    steps = [name.split(".") for name in paths if name.startswith(prefix)]
    return sorted({".".join(parts[: level + 1]) + ("=" if len(parts) == level + 1 else ".") for parts in steps})


def settings(cls: type[Spec], prefix: str = "", inside: tuple[type[Spec], ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Every path below a class, over all members of its families, with the values that can be listed."""
    for name, field in declared(cls).items():
        path, types = f"{prefix}{name}", list(_alternatives(field.type))
        classes = [one for one in types if isinstance(one, type) and issubclass(one, Spec)]
        classes_below = [member for one in classes for member in (members(one).values() if is_family(one) else [one])]
        values = [f"{one.__qualname__}()" for one in classes_below]
        values += [text for one in types if one is bool for text in ("True", "False")]
        values += [str(value) for one in types if get_origin(one) is Literal for value in get_args(one)]
        values += ["None" for one in types if one is type(None)]
        yield path, values
        for one in classes_below:
            if one not in inside and one is not Experiment:
                yield from settings(one, f"{path}.", (*inside, one))


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types of a union; of another type, itself."""
    options = get_args(annotation) if get_origin(annotation) is not Literal else ()
    if options and get_origin(annotation) is not tuple:
        for option in options:
            yield from _alternatives(option)
    else:
        yield annotation
