"""Shared by the verbs `launch` and `sweep`: arguments, launcher, environment variables of the runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

from nnxdsl.cli.arguments import add_json, add_overrides, add_quiet, add_target
from nnxdsl.config.core.base import members
from nnxdsl.config.core.codegen import parse_value
from nnxdsl.config.launcher import Launcher, Local
from nnxdsl.errors import Problem, SpecError
from nnxdsl.launch.job import import_path


def add_launching(parser: ArgumentParser, metavar: str) -> None:
    """Adds the arguments of both verbs."""
    add_target(parser, metavar)
    add_overrides(parser)
    parser.add_argument("--launcher", metavar="LAUNCHER", help="launcher that starts the runs")
    parser.add_argument("--cancel", action="store_true", help="stop running runs after they save a checkpoint")
    add_json(parser)
    add_quiet(parser)
    parser.epilog = launcher_help()


def launcher_help() -> str:
    """Help text on the syntax of LAUNCHER, with all launchers."""
    launchers = {cls.__qualname__: (cls.__doc__ or "").partition("\n")[0] for cls in members(Launcher).values()}
    return "\n".join(
        [
            'LAUNCHER is a Python expression; omitted fields have their defaults: "Launcher.Slurm(nodes=2)"',
            *(f"  {name:<20} {text}" for name, text in launchers.items()),
            "Default: `launcher = Launcher...` in FILE if it is defined, else Launcher.Local().",
        ]
    )


def launcher_of(args: Namespace, module: ModuleType | None) -> Launcher:
    """The launcher of the command line, else of the file, else `Launcher.Local()`.

    Raises:
        SpecError: the value is not a launcher.
    """
    launcher = vars(module).get("launcher") if module is not None else None
    if args.launcher is not None:
        try:
            launcher = parse_value(args.launcher)
        except SpecError as error:
            raise SpecError([problem.under("--launcher") for problem in error.problems], error.where) from error
    elif launcher is None:
        launcher = Local()
    if not isinstance(launcher, Launcher):
        path = "launcher" if args.launcher is None else "--launcher"
        hint = Launcher.hint_for(launcher)
        raise SpecError([Problem(path, f'expected a launcher such as "Launcher.Local()", got {launcher!r}{hint}')])
    return launcher


def environment_of(path: Path, module: ModuleType | None) -> dict[str, str]:
    """Environment variables that let a run's process import modules next to the user's file."""
    return {} if module is None else import_path(path.parent)
