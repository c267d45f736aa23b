"""What the verbs `launch` and `sweep` share: the launcher, the user's module, the environment of the runs."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

from nnxdsl.cli.arguments import add_json, add_overrides, add_quiet, add_target
from nnxdsl.config.core.base import members
from nnxdsl.config.core.codegen import parse_value
from nnxdsl.config.launcher import Launcher, Local
from nnxdsl.errors import Problem, SpecError


def add_launching(parser: ArgumentParser, metavar: str) -> None:
    """Declares the arguments of both verbs."""
    add_target(parser, metavar)
    add_overrides(parser)
    parser.add_argument("--launcher", metavar="LAUNCHER", help="where runs are started")
    parser.add_argument("--cancel", action="store_true", help="stop what is running, after it has saved")
    add_json(parser)
    add_quiet(parser)
    parser.epilog = launcher_help()


def launcher_help() -> str:
    """How LAUNCHER is written, with every member of the family."""
    launchers = {cls.__qualname__: (cls.__doc__ or "").partition("\n")[0] for cls in members(Launcher).values()}
    return "\n".join(
        [
            'LAUNCHER is written as in Python, fields at their defaults left out: "Launcher.Slurm(nodes=2)"',
            *(f"  {name:<20} {text}" for name, text in launchers.items()),
            "Without --launcher it is the file's own `launcher = Launcher...`, or Launcher.Local().",
        ]
    )


def launcher_of(args: Namespace, module: ModuleType | None) -> Launcher:
    """The launcher of the command line, else of the file, else this machine.

    Raises:
        SpecError: it is no launcher.
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
    """Variables with which a run's process can import the modules beside the user's file."""
    if module is None:
        return {}
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = dict.fromkeys([str(path.parent.resolve()), *(place for place in inherited if place)])
    return {"PYTHONPATH": os.pathsep.join(places)}
