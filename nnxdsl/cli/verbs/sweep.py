"""Run every point of a file's `sweep = Sweep(...)`, or its `sweep = Search(...)`.

FILE is a Python file, or HOME/sweeps/NAME of a sweep that was started before. Finished runs are skipped, running ones
are waited for, failed ones are reported. A sweep that was killed resumes when it is started again. Results are written
to HOME/sweeps: results.json, results.svg.

exit codes: 0 all finished, or stopped on request; 1 some failed; 2 rejected; 130 Ctrl-C, running runs continue
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

import attrs
from rich.console import Console

from nnxdsl.cli.arguments import refuse_both
from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED
from nnxdsl.cli.launch_arguments import add_launching, environment_of, launcher_of
from nnxdsl.cli.load import load_module, override
from nnxdsl.config.core.base import declared
from nnxdsl.config.core.imports import allow_names_in
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.launcher import Launcher
from nnxdsl.config.search import Search
from nnxdsl.config.sweep import Sweep
from nnxdsl.errors import Problem, RunError, SpecError
from nnxdsl.runs.lock import RunLock
from nnxdsl.sweep.drive import drive
from nnxdsl.sweep.results import show_rows
from nnxdsl.sweep.spec_file import FILE, read_spec
from nnxdsl.sweep.sweep import DIRECTORY, SweepDirectory
from nnxdsl.terminal.display import Display


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_launching(parser, "FILE")
    parser.add_argument("--parallel", type=int, metavar="N", help="maximum number of concurrent runs")
    parser.add_argument("--metric", metavar="NAME", help="sort results by this metric, such as eval/loss")
    parser.add_argument("--retry-failed", action="store_true", help="restart failed runs")
    parser.add_argument("--show", action="store_true", help="print the results so far and start nothing")


def run(args: Namespace) -> int:
    """Run or resume a sweep or a search, print its results and return the exit code."""
    path = Path(args.target)
    sweep, variables, launcher = _defined(path, args) if path.suffix == ".py" else _started(path, args)
    refuse_both(args, ("show", "cancel"), ("show", "retry_failed"), ("cancel", "retry_failed"))
    return _sweep(sweep, _with_parallel(launcher, args.parallel), variables, args)


def _defined(path: Path, args: Namespace) -> tuple[Sweep | Search, Mapping[str, str], Launcher]:
    """The sweep of a Python file, the variables of its runs, and its launcher."""
    if not path.is_file():
        raise RunError(f"{path}: no such Python file; a sweep is defined in a Python file as `sweep = Sweep(...)`")
    module = load_module(path)
    sweep = vars(module).get("sweep")
    if not isinstance(sweep, Sweep | Search):
        raise RunError(f"{path}: has no Sweep or Search named 'sweep'")
    allow_names_in(sweep)
    if args.overrides:
        sweep = attrs.evolve(sweep, base=override(sweep.base, args.overrides))
    return sweep, environment_of(path, module), launcher_of(args, module)


def _started(path: Path, args: Namespace) -> tuple[Sweep | Search, Mapping[str, str], Launcher]:
    """The same of the directory of a sweep that was started before."""
    if not (path / FILE).is_file():
        raise RunError(
            f"{path}: neither a Python file, which defines `sweep = Sweep(...)`, nor the directory of a sweep"
        )
    if args.overrides:
        raise RunError(f"{' '.join(args.overrides)}: a sweep that was started is not changed; change its Python file")
    if path.resolve().parent != args.home.resolve() / DIRECTORY:
        raise RunError(f"{path}: is not in {args.home / DIRECTORY}; give its home with --home")
    return read_spec(path), environment_of(path, None), launcher_of(args, None)


def _with_parallel(launcher: Launcher, parallel: int | None) -> Launcher:
    if parallel is None:
        return launcher
    if "parallel" not in declared(type(launcher)):
        raise SpecError([Problem("--parallel", f"has no effect on {type(launcher).__qualname__}")])
    return evolve(launcher, {"parallel": parallel})


def _sweep(sweep: Sweep | Search, launcher: Launcher, variables: Mapping[str, str], args: Namespace) -> int:
    if args.retry_failed and isinstance(sweep, Search):
        raise RunError(
            "--retry-failed has no effect on a search, which already uses the failed trials; increase its trials"
        )
    directory = SweepDirectory.open(sweep, args.home)
    if args.show:
        return _report(directory, args, [])
    if args.cancel:
        directory.request_stop()
    with Display(quiet=args.quiet) as display, contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunLock(directory.path))
        except RunError:
            if not args.cancel:
                raise
            display.say("stop requested; the command that drives the sweep stops all runs and exits")
            return 0
        if not args.cancel:
            directory.clear_requests()
        try:
            states = drive(
                directory,
                launcher,
                display,
                variables=variables,
                retry_failed=args.retry_failed,
                cancel=args.cancel,
            )
        except KeyboardInterrupt:
            display.close()
            display.say("interrupted; running runs continue: the same command waits for them, --cancel stops them")
            return INTERRUPTED
        finally:
            if args.cancel:
                directory.clear_requests()
    return _report(directory, args, states)


def _report(directory: SweepDirectory, args: Namespace, states: list[str]) -> int:
    """Write and print the results; returns the exit code."""
    rows, results = directory.report(args.metric)
    if args.json:
        sys.stdout.write(json.dumps({"directory": str(directory.path), **results}, indent=2) + "\n")
    else:
        console = Console(highlight=False)
        if rows:
            show_rows(rows, results["metric"], console)
        for row in rows:
            if row.error and row.state == "failed":
                sys.stdout.write(f"{row.run} failed: {row.error.splitlines()[0]}\n")
        place, here = directory.path, Path.cwd()
        shown = place.relative_to(here) if place.is_relative_to(here) else place
        sys.stdout.write(f"{shown}: results.json, results.svg\n")
    return FAILED if any(state in ("failed", "preempted") for state in states) else 0
