"""The verbs `launch` and `sweep`: words to objects to one of two commands. Loads no jax: runs are other processes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn, cast

import attrs

from nnxdsl.cli import dispatch, launch, sweep
from nnxdsl.config.core.base import declared
from nnxdsl.config.core.codegen import parse_value
from nnxdsl.config.core.imports import allow_imports, allow_names_in
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.launcher import Launcher, Local
from nnxdsl.config.search import Search
from nnxdsl.config.sweep import Sweep
from nnxdsl.errors import Problem, RunError, SpecError

_LAUNCHER = """\
LAUNCHER is written as in Python, the fields at their defaults left out:
  "Launcher.Local(parallel=2)"                   processes of this machine
  "Launcher.Slurm(partition='gpu', nodes=2)"     jobs of Slurm; needs nnxdsl[slurm]
  "Launcher.Ray(address='auto', gpus=1)"         actors of Ray; needs nnxdsl[ray]
  "Launcher.Kubernetes(image='...', nodes=4)"    a file for kubectl (launch --write)
  "Launcher.SkyPilot(accelerators='H200:8')"     a file for sky (launch --write)
Without --launcher it is the file's own `launcher = Launcher...`, or Launcher.Local().
"""

_HELP = {
    "launch": """\
Starts the run as processes of their own, waits for it and shows how far it is. Ctrl-C leaves it at
work, and the same command waits for it again; a run that was killed or preempted is started again,
as often as the launcher's `retries` say. What it prints stands in HOME/.launch/RUN/output.txt, all
else in the run's directory.

exit codes: 0 finished, or stopped on request; 1 failed; 2 refused; 130 Ctrl-C, and the run goes on
""",
    "sweep": """\
FILE has a `sweep = Sweep(...)` or a `sweep = Search(...)`. Runs that have finished are not run
again, those at work are waited for, those that failed are told of. Killed and started again, it goes on.
What it came to stands in HOME/sweeps: results.json, results.svg.

exit codes: 0 all finished, or stopped on request; 1 some failed; 2 refused;
  130 Ctrl-C, and runs at work go on
""",
}


class _Words(argparse.Namespace):
    file: str
    changes: list[str]
    home: Path
    allow: list[str] | None
    launcher: str | None
    parallel: int | None
    json: bool
    quiet: bool
    cancel: bool
    detach: bool
    write: str | None
    metric: str | None
    retry_failed: bool
    show: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise dispatch.UsageError(f"{message}; see {self.prog} --help")


def main(verb: str, argv: Sequence[str]) -> int:
    """`nnxdsl launch FILE ...` and `nnxdsl sweep FILE ...`.

    Raises:
        NnxdslError: refused.
    """
    words = _parser(verb).parse_intermixed_args(argv, _Words())
    allow_imports(*words.allow or ())
    return _launch(words) if verb == "launch" else _sweep(words)


def _parser(verb: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"nnxdsl {verb}",
        usage=f"%(prog)s {'FILE-or-RUN' if verb == 'launch' else 'FILE'} [path=value ...] [flags]",
        description=_HELP[verb],
        epilog=_LAUNCHER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", help=argparse.SUPPRESS)
    parser.add_argument("changes", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, default=Path("runs"), help="directory of all runs (default: runs)")
    dispatch.add_allow(parser)
    parser.add_argument("--launcher", metavar="LAUNCHER", help="where runs are started")
    parser.add_argument("--cancel", action="store_true", help="stop what is at work, everything saved")
    parser.add_argument("--json", action="store_true", help="print for machines, on standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    if verb == "launch":
        parser.add_argument("--detach", action="store_true", help="return once it is started; it is not started again")
        parser.add_argument("--write", metavar="PATH", help="the file of a launcher that writes one; - prints it")
    else:
        parser.add_argument("--parallel", type=int, metavar="N", help="runs at one time")
        parser.add_argument("--metric", metavar="NAME", help="sort by this figure: eval/loss")
        parser.add_argument("--retry-failed", action="store_true", help="start runs that failed again")
        parser.add_argument("--show", action="store_true", help="start nothing, print what there is")
    return parser


def _launch(words: _Words) -> int:
    path = Path(words.file)
    module = dispatch.load_module(path) if path.suffix == ".py" and path.is_file() else None
    found: object = getattr(module, "experiment", None)
    if module is not None and not isinstance(found, Experiment):
        raise RunError(f"{path}: has no Experiment named 'experiment'")
    allow_names_in(found)
    experiment = found if isinstance(found, Experiment) else dispatch.load(words.file, words.home)
    experiment = dispatch.override(experiment, words.changes)
    launcher = _launcher(words, module)
    for one, other in (("detach", "cancel"), ("write", "detach"), ("write", "cancel"), ("write", "json")):
        _refuse_both(words, one, other)
    asked = launch.LaunchArgs(
        launcher,
        words.home,
        _variables(path, module),
        detach=words.detach,
        cancel=words.cancel,
        write=words.write,
        as_json=words.json,
        quiet=words.quiet,
    )
    return launch.launch_command(experiment, asked)


def _sweep(words: _Words) -> int:
    path = Path(words.file)
    if path.suffix != ".py" or not path.is_file():
        raise RunError(f"{words.file}: there is no such Python file; a sweep is written as `sweep = Sweep(...)` in one")
    module = dispatch.load_module(path)
    found: object = getattr(module, "sweep", None)
    if not isinstance(found, Sweep | Search):
        raise RunError(f"{path}: has no Sweep or Search named 'sweep'")
    allow_names_in(found)
    if words.changes:
        found = attrs.evolve(found, base=dispatch.override(found.base, words.changes))
    for one, other in (("show", "cancel"), ("show", "retry_failed"), ("cancel", "retry_failed")):
        _refuse_both(words, one, other)
    asked = sweep.SweepArgs(
        _launcher(words, module),
        words.home,
        _variables(path, module),
        metric=words.metric,
        retry_failed=words.retry_failed,
        show=words.show,
        cancel=words.cancel,
        as_json=words.json,
        quiet=words.quiet,
    )
    return sweep.sweep_command(found, asked)


def _launcher(words: _Words, module: ModuleType | None) -> Launcher:
    """The launcher of the command line, else of the file, else this machine.

    Raises:
        SpecError: it is none, or cannot do what is asked.
    """
    found: object = getattr(module, "launcher", None)
    if words.launcher is not None:
        try:
            found = parse_value(words.launcher)
        except SpecError as error:
            raise SpecError([problem.under("--launcher") for problem in error.problems], error.where) from error
    elif found is None:
        found = Local()
    if not isinstance(found, Launcher):
        where = "launcher" if words.launcher is None else "--launcher"
        hint = Launcher.hint_for(found)
        raise SpecError([Problem(where, f'expected a launcher such as "Launcher.Local()", got {found!r}{hint}')])
    parallel = cast("int | None", getattr(words, "parallel", None))
    if parallel is None:
        return found
    if "parallel" not in declared(type(found)):
        raise SpecError([Problem("--parallel", f"has no effect on {type(found).__qualname__}")])
    return evolve(found, {"parallel": parallel})


def _refuse_both(words: _Words, one: str, other: str) -> None:
    if getattr(words, one) and getattr(words, other):
        raise dispatch.UsageError(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} exclude each other")


def _variables(path: Path, module: ModuleType | None) -> dict[str, str]:
    """What lets the run's own process import what stands beside the file."""
    if module is None:
        return {}
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = dict.fromkeys([str(path.parent.resolve()), *(place for place in known if place)])
    return {"PYTHONPATH": os.pathsep.join(places)}
