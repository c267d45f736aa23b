"""Entry points of the command line: select the verb, parse its arguments, run it, and map errors to exit codes.

A verb is a module of `nnxdsl/cli/verbs`: its docstring is its help, `add_arguments(parser)` declares its arguments, and
`run(args)` returns the exit code. Verbs import jax inside `run`, so that help and usage errors are immediate.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nnxdsl.cli import verbs
from nnxdsl.cli.arguments import Parser, UsageError, flags_of, unknown_flags
from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED, REFUSED
from nnxdsl.config.core.imports import allow_names_in
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, nearest
from nnxdsl.runtime.limits import exhausted

VERBS = tuple(module.name for module in pkgutil.iter_modules(verbs.__path__))
OF_A_FILE = tuple(verb for verb in VERBS if verb not in ("app", "launch", "sweep"))
"""Verbs that are available in the command line of an experiment's own file."""

_EPILOG = """\
FILE is a Python file with an `experiment`, a JSON file, a run directory or a run id.
Python files import their modules as usual. Names in JSON files and runs (module:name) are imported
only from modules given by --allow or NNXDSL_ALLOW.
path=value sets a field: steps=10  objective.beta=0.2  "objective=Objective.DPO(beta=0.2)"
Values are Python literals or objects; anything else is a string.

exit codes: 0 finished, or stopped by RUN/control/stop; 1 training failed;
  2 rejected, nothing written; 130, 143 stopped by SIGINT, SIGTERM after saving a checkpoint
"""


def main(argv: Sequence[str] | None = None) -> int:
    """`nnxdsl VERB FILE-or-RUN [path=value ...]`; returns the process's exit code."""
    if "_ARGCOMPLETE" in os.environ:  # a shell completes a line
        importlib.import_module("nnxdsl.cli.completion").complete(_parser(VERBS, "nnxdsl", "", None, is_whole=True))
    argv = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _command(argv, VERBS, "nnxdsl", "VERB [FILE-or-RUN] [path=value ...] [flags]", None))


def main_of(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """`python FILE [run|show|plan|diff OTHER] [path=value ...]`; returns the process's exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    allow_names_in(experiment)
    if not argv or "=" in argv[0] or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv.insert(0, "run")
    prog = Path(sys.argv[0]).name
    usage = "[run|show|plan|diff OTHER] [path=value ...] [flags]"
    return _guarded(lambda: _command(argv, OF_A_FILE, prog, usage, experiment))


def _command(argv: list[str], names: Sequence[str], prog: str, usage: str, experiment: Experiment | None) -> int:
    verb = argv[0] if argv else ""
    if not argv or verb in ("-h", "--help"):
        _parser(names, prog, usage, experiment).print_help(sys.stdout if argv else sys.stderr)
        return 0 if argv else REFUSED
    if verb not in names:
        raise UsageError(_unknown_verb(verb, argv[1:], names, prog))
    args, rest = _parser([verb], prog, usage, experiment).parse_known_args(argv)
    if any(word.startswith("-") for word in rest):
        others = {flag for other in names if other != verb for flag in _flags(other, experiment)}
        raise unknown_flags(verb, rest, _flags(verb, experiment), others, f"{prog} {verb}")
    if rest and "overrides" not in args:
        raise UsageError(f"{rest[0]}: unexpected argument; see {prog} {verb} --help")
    if rest:  # argparse ends a list of positional arguments at the first flag
        args.overrides = [*args.overrides, *rest]
    return args.run(args)


def _parser(
    names: Iterable[str], prog: str, usage: str, experiment: Experiment | None, *, is_whole: bool = False
) -> Parser:
    """Build the parser for the verb to run, or for all verbs: without their arguments (--help) unless `is_whole`."""
    what = "Run, resume and inspect post-training experiments."
    description = what if experiment is None else f"The experiment '{experiment.name}'."
    parser = Parser(prog=prog, usage=f"%(prog)s {usage}", description=description, epilog=_EPILOG)
    commands = parser.add_subparsers(title="verbs", metavar="VERB", prog=prog, parser_class=Parser)
    names = list(names)
    for name in names:
        module = importlib.import_module(f"{verbs.__name__}.{name}")
        text = inspect.getdoc(module) or ""
        command = commands.add_parser(name, help=text.partition("\n")[0], description=text)
        command.set_defaults(run=module.run, experiment=experiment)
        if is_whole or len(names) == 1:
            module.add_arguments(command)
    return parser


def _flags(verb: str, experiment: Experiment | None) -> set[str]:
    parser = Parser()
    parser.set_defaults(experiment=experiment)
    with suppress(NnxdslError):
        importlib.import_module(f"{verbs.__name__}.{verb}").add_arguments(parser)
    return flags_of(parser)


def _unknown_verb(word: str, rest: Sequence[str], names: Sequence[str], prog: str) -> str:
    if rest and rest[0].startswith("="):
        value = "".join(rest[:2]).lstrip("=") or "..."
        return f"{word}: write path=value without spaces: {word}={value}"
    if Path(word).is_file() or "=" in word or word.startswith("-"):
        return f"{word}: expected a verb first: {', '.join(names)}"
    return f"{word}: there is no such verb{nearest(word, names) or '; there are: ' + ', '.join(names)}"


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except NnxdslError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return REFUSED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; no run was active\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        message = exhausted(error)
        if message is None:
            raise
        sys.stderr.write(f"{message}\n")
        return FAILED
