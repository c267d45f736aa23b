"""The command line: words to objects to one of a few verbs. Loads jax only for the verbs that compute."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED, REFUSED
from nnxdsl.config.core.base import declared
from nnxdsl.config.core.codegen import parse_value, render, to_python
from nnxdsl.config.core.imports import allow_imports, allow_names_in, names_in
from nnxdsl.config.core.serialization import diff, evolve, flatten, from_dict, from_json, get, to_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, Problem, RunError, SpecError, nearest
from nnxdsl.runs.run_dir import RunDirectory, list_runs
from nnxdsl.runtime import xla_flags
from nnxdsl.runtime.limits import exhausted, require_address_space

VERBS = ("run", "show", "plan", "diff", "runs", "resume", "export", "convert", "compare")
_PLAN_FLAGS = ("device", "count", "compile", "search", "why", "draw", "dump", "limit")
_SERVES = {
    "python": ("show",),
    "quiet": ("run", "resume"),
    "restart": ("run",),
    **dict.fromkeys(("coordinator", "processes", "process"), ("run", "resume")),
    "layout": ("diff",),
    "adapter": ("export",),
    "max_shard_size": ("export", "convert"),
    "dtype": ("export", "convert"),
    "to": ("convert",),
    "unrolled": ("convert",),
    "rtol": ("compare",),
    "atol": ("compare",),
    **dict.fromkeys(_PLAN_FLAGS, ("plan",)),
    "allow": tuple(verb for verb in VERBS if verb != "runs"),
}
"""The verbs on which a flag has an effect."""

_COMPUTES = ("run", "plan", "resume", "export", "convert", "compare")
"""The verbs that load jax."""

_PRINTS = ("json", "python", "why", "draw", "dump")
"""Flags that say what is printed; one of them at a time."""

_HELP = """\
verbs:
  run FILE        train, or go on where the run's directory stands
  show FILE       every path and its value; what differs from the file is marked
  plan FILE       steps, tokens, parameters, memory and shardings, before a device is touched
                    --device h200 [--count 8]  whether it fits; --compile: ask the compiler itself
                    --search                   the meshes, micro-batches, remat that fit, best first
                    --why PATH, --draw PATH    the rules and the picture of one array
                    --dump                     the layout as text, one line an array
  diff FILE OTHER what differs, and whether it is the same run; --layout: which arrays lie elsewhere
  runs            all runs and how they stand
  resume RUN      go on with a run; only placement and cadence may change
  export RUN DIR  what a run learnt, for transformers to load
                    --adapter                  the adapter alone, for PEFT
                    --dtype bfloat16 --max-shard-size 5GB
  convert SRC DST --to FORMAT   weights as hub, checkpoint or linen; --unrolled: each layer alone
  app             the web app: launch, watch and compare runs in a browser; see nnxdsl app --help
  launch FILE     run it elsewhere: --launcher "Launcher.Slurm(nodes=2)"; see nnxdsl launch --help
  sweep FILE      run every point of its `sweep`, or its search; see nnxdsl sweep --help
  compare A B     weights of two formats, array by array; exit code 1 where they differ
                    --rtol R --atol A          differences that do not count

FILE is a Python file with an `experiment`, a JSON file, a run's directory or its id.
What a Python file names is imported. Names in JSON files and runs (module:name) are imported only
from modules given by --allow or NNXDSL_ALLOW.
path=value sets a field: steps=10  objective.beta=0.2  "objective=Objective.DPO(beta=0.2)"
Values are Python literals or objects; anything else is text.

exit codes: 0 done, or stopped by RUN/control/stop; 1 failed while training; 2 refused;
  130, 143 stopped by SIGINT (Ctrl-C), SIGTERM with everything saved
"""


class UsageError(NnxdslError):
    """Words that make no command."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class _Options(argparse.Namespace):
    words: list[str]
    home: Path
    allow: list[str] | None
    json: bool
    python: bool
    quiet: bool
    restart: bool
    coordinator: str | None
    processes: int | None
    process: int | None
    layout: bool
    device: str | None
    count: int | None
    compile: bool
    search: bool
    why: str | None
    draw: str | None
    dump: bool
    limit: int | None
    adapter: bool
    max_shard_size: str | None
    dtype: str | None
    to: str | None
    unrolled: bool
    rtol: float | None
    atol: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """`nnxdsl VERB FILE-or-RUN [path=value ...]`."""
    parser = _parser(
        "nnxdsl", "VERB [FILE-or-RUN] [path=value ...]", "Run, resume and inspect post-training experiments."
    )

    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["app"]:  # whose flags are its own
        return _guarded(lambda: _app().main(words[1:]))
    if words[:1] in (["launch"], ["sweep"]):  # and theirs
        return _guarded(lambda: importlib.import_module("nnxdsl.cli.launch_args").main(words[0], words[1:]))

    def command() -> int:
        options = _parsed(parser, argv)
        if not options.words:
            parser.print_help(sys.stderr)
            return REFUSED
        return _dispatch(options.words[0], options, options.words[1:])

    return _guarded(command)


def main_of(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """`python FILE [run|show|plan|diff OTHER] [path=value ...]`."""
    parser = _parser(None, "[run|show|plan|diff OTHER] [path=value ...]", f"The experiment '{experiment.name}'.")

    def command() -> int:
        options = _parsed(parser, argv)
        allow_names_in(experiment)
        words = list(options.words)
        verb = words.pop(0) if words and "=" not in words[0] else "run"
        return _dispatch(verb, options, words, experiment)

    return _guarded(command)


def _parser(prog: str | None, usage: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        usage=f"%(prog)s {usage} [flags]",
        description=description,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, default=Path("runs"), help="directory of all runs (default: runs)")
    add_allow(parser)
    parser.add_argument("--json", action="store_true", help="print for machines, on standard output")
    parser.add_argument("--python", action="store_true", help="show: a Python file that builds the experiment")
    parser.add_argument("--quiet", action="store_true", help="run, resume: no progress")
    parser.add_argument(
        "--restart", action="store_true", help="run: move away what the run's directory holds, begin again"
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="run, resume: where process 0 of several listens")
    parser.add_argument("--processes", type=int, metavar="N", help="run, resume: how many processes run it together")
    parser.add_argument("--process", type=int, metavar="I", help="run, resume: which of them this is, from 0")
    parser.add_argument("--layout", action="store_true", help="diff: the arrays that lie elsewhere")
    parser.add_argument("--device", metavar="NAME", help="plan: the device that it is for: h200, v5e, ...")
    parser.add_argument("--count", type=int, metavar="N", help="plan: how many devices")
    parser.add_argument("--compile", action="store_true", help="plan: compile it, on this machine, for that device")
    parser.add_argument("--search", action="store_true", help="plan: look for placements that fit, quickest first")
    parser.add_argument("--why", metavar="PATH", help="plan: every rule that was tried for one array")
    parser.add_argument("--draw", metavar="PATH", help="plan: which device holds which block of one array")
    parser.add_argument("--dump", action="store_true", help="plan: the layout as text")
    parser.add_argument("--limit", type=int, metavar="S", help="plan --compile: seconds it may take (default: 300)")
    parser.add_argument("--adapter", action="store_true", help="export: the adapter alone, in PEFT's format")
    parser.add_argument("--dtype", metavar="NAME", help="export, convert: float32, bfloat16 or float16")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="export, convert: the most in one file: 5GB, 500MB")
    parser.add_argument("--to", metavar="FORMAT", help="convert: hub, checkpoint or linen")
    parser.add_argument("--unrolled", action="store_true", help="convert --to linen: each layer by itself")
    parser.add_argument("--rtol", type=float, metavar="R", help="compare: relative difference that does not count")
    parser.add_argument("--atol", type=float, metavar="A", help="compare: absolute difference that does not count")
    return parser


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Adds `--allow MODULE`, which may be given several times, to a parser."""
    parser.add_argument(
        "--allow", action="append", metavar="MODULE", help="a module that JSON files and runs may import by name"
    )


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> _Options:
    options, unknown = parser.parse_known_intermixed_args(argv, _Options())
    if unknown:
        words = list(sys.argv[1:] if argv is None else argv)
        flag, equals, value = unknown[0].partition("=")
        if not equals:  # `--steps 10`
            value = next((word for word in words[words.index(flag) + 1 :][:1] if not word.startswith("-")), "")
        path = flag.lstrip("-").replace("-", "_")
        if path.partition(".")[0] in declared(Experiment):
            raise UsageError(
                f"{unknown[0]}: there is no such flag; fields are set as path=value: {path}={value or '...'}"
            )
        known = [name for action in parser._actions for name in action.option_strings]  # pyright: ignore[reportPrivateUsage]
        raise UsageError(f"{unknown[0]}: there is no such flag{nearest(flag, known) or f'; see {parser.prog} --help'}")
    return options


def _app() -> Any:
    """The web app's command: `nnxdsl/_app` where nnxdsl is installed, the folder `app` beside it in a checkout.

    It is found by its place and never by the name `app`, which may be anything in other people's directories.
    """
    here = Path(__file__).parents[1]
    place = next((path for path in (here / "_app", here.parent / "app") if (path / "command.py").is_file()), None)
    if place is None:
        raise RunError(f"the app's files are missing: there is no {here / '_app'}; install nnxdsl again")
    name = "nnxdsl._app"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, place / "__init__.py", submodule_search_locations=[str(place)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return importlib.import_module(f"{name}.command")


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except NnxdslError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return REFUSED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted while no run was going on\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if (said := exhausted(error)) is None:
            raise
        sys.stderr.write(f"{said}\n")
        return FAILED


def _dispatch(verb: str, options: _Options, words: list[str], experiment: Experiment | None = None) -> int:
    if verb not in VERBS:
        raise UsageError(_no_verb(verb, words))
    _refuse_idle_flags(verb, options)
    allow_imports(*options.allow or ())
    if verb in _COMPUTES:
        require_address_space()
    if verb == "runs":
        if words:
            raise UsageError(f"{words[0]}: runs takes no words; name another directory of runs with --home")
        return _runs(options.home, as_json=options.json)
    if verb == "resume":
        return _resume(options, _taken(words, "resume needs a run: its directory or its id"), words)
    if verb in ("export", "convert", "compare"):
        return _weights(verb, options, [experiment.id, *words] if experiment and verb == "export" else words)
    if experiment is None:
        experiment = load(_taken(words, f"{verb} needs a file or a run"), options.home)
    if verb == "diff":
        other = load(_taken(words, "diff needs another file or run to compare with"), options.home)
        changed = override(experiment, words)
        if options.layout:
            command = importlib.import_module("nnxdsl.cli.plan")
            return command.diff_layouts(changed, other, as_json=options.json)
        return _diff(changed, other, as_json=options.json)
    changed = override(experiment, words)
    if verb == "show":
        return _show(experiment, changed, options)
    if verb == "plan":
        command = importlib.import_module("nnxdsl.cli.plan")
        given = {flag: getattr(options, flag) for flag in _PLAN_FLAGS if getattr(options, flag) is not None}
        return command.plan_command(changed, command.PlanArgs(**given, as_json=options.json, home=options.home))
    return _run(changed, options.home, options)


def _run(experiment: Experiment, home: Path, options: _Options) -> int:
    xla_flags.prepare(home, experiment.mesh.device_count)  # jax reads them when it is loaded
    command = importlib.import_module("nnxdsl.cli.run")
    asked = command.DistributedArgs(options.coordinator, options.processes, options.process)
    return command.run_command(
        experiment, home, quiet=options.quiet, restart=options.restart, as_json=options.json, asked=asked
    )


def _weights(verb: str, options: _Options, words: list[str]) -> int:
    """Verbs that read and write weights."""
    needs = {
        "export": ("a run: its directory or its id", "a directory to write"),
        "convert": ("weights to read", "a directory to write"),
        "compare": ("weights to compare", "other weights to compare with"),
    }
    first, second = (_taken(words, f"{verb} needs {what}") for what in needs[verb])
    if words:
        raise UsageError(f"{words[0]}: {verb} takes two words, no more")
    # A bare id means a run; what is there means itself.
    source = _weights_path(first, options.home)
    other = _weights_path(second, options.home) if verb == "compare" else Path(second)
    if verb == "export" and not source.exists():
        source = run_directory(first, options.home)
    source, other = _as_started(source, other)
    command = importlib.import_module("nnxdsl.cli.weights")
    if verb == "compare":
        return command.compare_command(source, other, rtol=options.rtol, atol=options.atol, as_json=options.json)
    asked = command.ExportArgs(dtype=options.dtype, max_shard_size=options.max_shard_size, as_json=options.json)
    if verb == "export":
        return command.export_command(source, other, asked, adapter=options.adapter)
    if options.to is None:
        raise UsageError("convert needs a format: --to hub, --to checkpoint or --to linen")
    return command.convert_command(source, other, asked, to=options.to, unrolled=options.unrolled)


def _weights_path(word: str, home: Path) -> Path:
    path = Path(word)
    return home / path if not path.exists() and (home / path / "run.json").is_file() else path


def _as_started(source: Path, other: Path) -> tuple[Path, Path]:
    """Goes to where a run was started, so that relative paths in its experiment mean what they meant there."""
    run = next((place for place in (source, *source.parents[:2]) if (place / "run.json").is_file()), None)
    started = RunDirectory(run).started_in() if run else None
    if started is None or started.resolve() == Path.cwd():
        return source, other
    absolute = source.absolute(), other.absolute()
    os.chdir(started)
    return absolute


def _no_verb(word: str, words: Sequence[str]) -> str:
    if words and words[0].startswith("="):
        value = "".join(words[:2]).lstrip("=") or "..."
        return f"{word}: write path=value without blanks: {word}={value}"
    if Path(word).is_file() or "=" in word:
        return f"{word}: a verb comes first: {', '.join(VERBS)}"
    return f"{word}: there is no such verb{nearest(word, VERBS) or '; there are: ' + ', '.join(VERBS)}"


def _refuse_idle_flags(verb: str, options: _Options) -> None:
    given = {flag for flag, value in vars(options).items() if value is not None and value is not False}
    idle = [flag for flag, verbs in _SERVES.items() if flag in given and verb not in verbs]
    if idle:
        raise UsageError("; ".join(f"--{flag.replace('_', '-')} has no effect on {verb}" for flag in idle))
    printed = [f"--{flag}" for flag in _PRINTS if flag in given]
    if len(printed) > 1:
        raise UsageError(f"{' and '.join(printed)} exclude each other")
    if verb == "plan":
        _refuse_idle_plan_flags(given)
        for flag, number in (("count", options.count), ("limit", options.limit)):
            if number is not None and number < 1:
                raise UsageError(f"--{flag}: expected a value > 0, got {number}")


def _refuse_idle_plan_flags(given: set[str]) -> None:
    alone = [f"--{flag}" for flag in ("compile", "why", "draw", "dump") if flag in given]
    if "search" in given and alone:
        raise UsageError(f"--search and {' and '.join(alone)} exclude each other")
    if "compile" in given and (alone := [f"--{flag}" for flag in ("why", "draw", "dump") if flag in given]):
        raise UsageError(f"--compile has no effect on what {' and '.join(alone)} prints")
    if "limit" in given and "compile" not in given:
        raise UsageError("--limit has no effect without --compile")


def _taken(words: list[str], complaint: str) -> str:
    """The first word, which must be a file or a run."""
    if not words or "=" in words[0]:
        raise UsageError(complaint)
    return words.pop(0)


def override(experiment: Experiment, words: Sequence[str]) -> Experiment:
    """The experiment with `path=value` words applied.

    Raises:
        SpecError: with every problem of all words together.
    """
    changes: dict[str, object] = {}
    problems: list[Problem] = []
    for word in words:
        path, equals, text = word.partition("=")
        if not equals or not path:
            problems.append(Problem(word, "expected path=value, without blanks around '='"))
        elif path in changes:
            problems.append(Problem(path, "is set twice"))
        else:
            try:
                changes[path] = parse_value(text)
            except SpecError as error:
                changes[path] = None
                problems += [problem.under(path) for problem in error.problems]
    if problems:
        raise SpecError(problems, f"Experiment '{experiment.name}'")
    if not changes:
        return experiment
    changed = evolve(experiment, changes)
    known = {name for _, name in names_in(experiment)}
    allow_imports(*(name for _, name in names_in(changed) if name not in known))  # typed by whoever runs it
    return changed


def load(target: str, home: Path) -> Experiment:
    """The experiment of a Python file, a JSON file, a run directory or a run's id.

    Raises:
        RunError: there is no such thing, or the file has no `experiment`.
        SpecError: what is there is no experiment.
    """
    path = Path(target)
    if path.suffix == ".py" and path.is_file():
        return _load_python(path)
    if path.is_file():
        return _load_json(path)
    return _load_json(run_directory(target, home) / "experiment.json")


def run_directory(target: str, home: Path) -> Path:
    """The run directory that a path or an id means.

    Raises:
        RunError: there is none; says where it was looked for, and what is near.
    """
    for candidate in (Path(target), home / target):
        if (candidate / "experiment.json").is_file():
            return candidate
    if Path(target).is_file():
        raise RunError(f"{target}: is a file; name a run, or run the file again to go on with its run")
    if Path(target).is_dir():
        raise RunError(f"{target}: is a directory, but no run: it has no experiment.json")
    known = nearest(target, [run.id for run in list_runs(home)])
    raise RunError(f"{target}: no such file or run (relative to {Path.cwd()}; runs are looked for in {home}){known}")


def _load_json(path: Path) -> Experiment:
    try:
        return from_json(path.read_text(encoding="utf-8"), Experiment)
    except SpecError as error:
        raise SpecError(error.problems, str(path)) from error
    except (OSError, UnicodeError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def _load_python(path: Path) -> Experiment:
    found: object = getattr(load_module(path), "experiment", None)
    if not isinstance(found, Experiment):
        raise RunError(f"{path}: has no Experiment named 'experiment'")
    allow_names_in(found)
    return found


def load_module(path: Path) -> ModuleType:
    """A user's Python file, read.

    Raises:
        RunError: it cannot be; names the line.
        NnxdslError: what it builds cannot be.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # so that recipes can import their neighbours, as when run directly
    try:
        spec.loader.exec_module(module)
    except NnxdslError:
        raise
    except SystemExit as error:
        message = 'ends the process when it is read; put experiment.main() under `if __name__ == "__main__":`'
        raise RunError(f"{path}: {message}") from error
    except Exception as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise RunError(f"{_line_of(error, path)}: {type(error).__name__}: {what}") from error
    finally:
        sys.path.pop(0)
    return module


def _line_of(error: Exception, path: Path) -> str:
    """`file:line` of what went wrong in a user's file, or in one that it imports and that does not parse."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((str(error.filename), error.lineno))
        file, line = places[-1]
        return f"{path if Path(file) == path.resolve() else file}:{line}"
    lines = [line for file, line in places if Path(file) == path.resolve()]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _show(original: Experiment, changed: Experiment, options: _Options) -> int:
    if options.json:
        sys.stdout.write(to_json(changed))
    elif options.python:
        sys.stdout.write(to_python(changed))
    else:
        before = flatten(original)
        for path, value in flatten(changed).items():
            mark = "" if path in before and before[path] == value else f"    # {_was(before, path)}"
            sys.stdout.write(f"{path} = {render(value)}{mark}\n")
        sys.stdout.write(f"# id: {changed.id}\n")
    return 0


def _was(before: dict[str, object], path: str) -> str:
    return f"in the file: {render(before[path])}" if path in before else "not in the file"


def _diff(left: Experiment, right: Experiment, *, as_json: bool) -> int:
    changes = {path: (get(left, path), value) for path, value in diff(left, right).items()}
    if as_json:
        plain = {path: {"left": render(old), "right": render(new)} for path, (old, new) in changes.items()}
        sys.stdout.write(json.dumps({"same_run": left.id == right.id, "changes": plain}, indent=2) + "\n")
        return 0
    for path, (old, new) in changes.items():
        sys.stdout.write(f"{path}: {render(old)} -> {render(new)}\n")
    count = f"{len(changes)} difference{'' if len(changes) == 1 else 's'}" if changes else "no differences"
    verdict = f"the same run: {left.id}" if left.id == right.id else f"different runs: {left.id}, {right.id}"
    sys.stdout.write(f"# {count}; {verdict}\n")
    return 0


def _runs(home: Path, *, as_json: bool) -> int:
    found = list_runs(home)
    if as_json:
        rows = [
            {"id": r.id, "state": r.state, "step": r.step, "total": r.total, "created": r.created, "problem": r.problem}
            for r in found
        ]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    if not found:
        sys.stdout.write(f"no runs in {home}\n")
    width = max((len(run.id) for run in found), default=0)
    for run in found:
        progress = "-" if run.total is None else f"{run.step or 0}/{run.total}"
        line = (
            f"{run.id:<{width}}  {run.state or 'damaged':<8}  {progress:>12}  {run.created or ''}  {run.problem or ''}"
        )
        sys.stdout.write(line.rstrip().encode(errors="backslashreplace").decode() + "\n")
    return 0


def _resume(options: _Options, target: str, words: list[str]) -> int:
    directory = run_directory(target, options.home)
    own = _load_json(directory / "experiment.json")
    if directory.resolve().name != own.id:
        raise RunError(f"{directory} holds the run {own.id}; name the directory so, or it would begin anew")
    run = RunDirectory(directory)
    asked = _last_attempted(run, own)
    changed = override(asked, words)
    if changed.id != asked.id:
        may = Experiment.outside_identity - {"name"}
        message = f"would make it another run than {asked.id}; on a resume only {', '.join(sorted(may))} may change"
        wrong = [path for path in diff(asked, changed) if path.partition(".")[0] not in may]
        raise SpecError([Problem(path, message) for path in wrong], f"Experiment '{asked.name}'")
    home = directory.parent.resolve()
    if (started := run.started_in()) is not None:
        os.chdir(started)  # relative paths in the experiment mean what they meant when it was started
    return _run(changed, home, options)


def _last_attempted(run: RunDirectory, own: Experiment) -> Experiment:
    """The experiment with the placement and cadence of the last attempt; the run's own before the first.

    Raises:
        RunError: that attempt has no experiment, or one of another run.
        SpecError: its experiment cannot be.
    """
    attempts = run.attempts()
    if not attempts:
        return own
    where = f"{run.path / 'attempts.jsonl'}: the last attempt"
    if "experiment" not in attempts[-1]:
        raise RunError(f"{where} has no experiment; remove its line")
    try:
        last = from_dict(attempts[-1]["experiment"], Experiment)
    except SpecError as error:
        raise SpecError(error.problems, where) from error
    if last.id != own.id:
        raise RunError(f"{where} is of the run {last.id} and not of {own.id}; remove its line")
    return last
