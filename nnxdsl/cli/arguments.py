"""Arguments shared by several verbs, and a parser whose errors are exceptions with hints."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from nnxdsl.cli.load import load, override
from nnxdsl.config.core.base import declared
from nnxdsl.config.core.imports import allow_imports
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, nearest


class UsageError(NnxdslError):
    """The command line is invalid."""


class Parser(ArgumentParser):
    """An argument parser that raises UsageError instead of exiting."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)  # pyright: ignore[reportArgumentType]

    def error(self, message: str) -> NoReturn:
        """Raise an error that `main` reports.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{message}; see {self.prog} --help")


class _Allow(argparse.Action):
    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: object, option: str | None = None) -> None:
        allow_imports(str(values))


def add_home(parser: ArgumentParser) -> None:
    """Adds `--home DIR`."""
    parser.add_argument(
        "--home", type=Path, default=Path("runs"), metavar="DIR", help="directory of all runs (default: runs)"
    )


def add_allow(parser: ArgumentParser) -> None:
    """Adds `--allow MODULE`, which can be repeated and takes effect when it is parsed."""
    help_text = "module that JSON files and runs may import by name; can be repeated"
    parser.add_argument("--allow", action=_Allow, metavar="MODULE", help=help_text)


def add_json(parser: argparse._ActionsContainer) -> None:  # pyright: ignore[reportPrivateUsage] - a parser or a group
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def add_quiet(parser: ArgumentParser) -> None:
    """Adds `--quiet`."""
    parser.add_argument("--quiet", action="store_true", help="do not print progress")


def add_target(parser: ArgumentParser, metavar: str = "FILE-or-RUN") -> None:
    """Adds the positional argument for the experiment, except in the command line of an experiment's own file."""
    add_home(parser)
    add_allow(parser)
    if parser.get_default("experiment") is None:
        help_text = "Python file" if metavar == "FILE" else "Python or JSON file, run directory or run id"
        parser.add_argument("target", metavar=metavar, help=help_text)


def add_overrides(parser: ArgumentParser) -> None:
    """Adds `path=value ...`, after all other positional arguments."""
    help_text = "set a field: steps=10 objective.beta=0.2"
    parser.add_argument("overrides", nargs="*", default=[], metavar="path=value", help=help_text)


def add_experiment(parser: ArgumentParser) -> None:
    """Adds `FILE-or-RUN [path=value ...]`, `--home` and `--allow`; `experiment_of` builds the experiment."""
    add_target(parser)
    add_overrides(parser)


def file_experiment(args: Namespace) -> Experiment:
    """Load the experiment of the first argument, without overrides."""
    return load(args.target, args.home) if args.experiment is None else args.experiment


def experiment_of(args: Namespace) -> Experiment:
    """Load the experiment of the first argument and apply the `path=value` overrides."""
    return override(file_experiment(args), args.overrides)


def positive(text: str, least: int = 1) -> int:
    """Parse an integer of at least `least`.

    Raises:
        ArgumentTypeError: the value is no such integer.
    """
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: '{text}'") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a value > {least - 1}, got {value}")
    return value


def refuse_both(args: Namespace, *pairs: tuple[str, str]) -> None:
    """Reject mutually exclusive flags that argparse's groups cannot express.

    Raises:
        UsageError: both flags of a pair are given.
    """
    for one, other in pairs:
        if getattr(args, one) and getattr(args, other):
            raise UsageError(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} exclude each other")


def flags_of(parser: ArgumentParser) -> set[str]:
    """The flags of a parser."""
    return {flag for action in parser._actions for flag in action.option_strings}  # pyright: ignore[reportPrivateUsage]


def unknown_flags(
    verb: str, rest: Sequence[str], flags: Iterable[str], flags_of_others: Iterable[str], prog: str
) -> UsageError:
    """Build the error for flags that a verb does not accept.

    Args:
        verb: The verb.
        rest: Arguments that its parser did not recognize; flags begin with "-".
        flags: Flags of the verb.
        flags_of_others: Flags of all other verbs.
        prog: Command whose --help lists the flags.
    """
    unknown = [word for word in rest if word.startswith("-")]
    names = {word: word.partition("=")[0] for word in unknown}
    if all(name in flags_of_others for name in names.values()):
        return UsageError("; ".join(f"{name} has no effect on {verb}" for name in names.values()))
    word = next(word for word, name in names.items() if name not in flags_of_others)
    name, equals, value = word.partition("=")
    if not equals:  # `--steps 10`
        value = next((item for item in rest[rest.index(word) + 1 :][:1] if not item.startswith("-")), "")
    path = name.lstrip("-").replace("-", "_")
    if path.partition(".")[0] in declared(Experiment):
        return UsageError(f"{word}: there is no such flag; fields are set as path=value: {path}={value or '...'}")
    return UsageError(f"{word}: there is no such flag{nearest(name, list(flags)) or f'; see {prog} --help'}")
