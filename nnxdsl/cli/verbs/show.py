"""Show all fields, their values, and where each comes from where the file does not give it.

`# default` is the class's, `# by objective and adapter` follows from these, `# command line` is set there.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from nnxdsl.cli.arguments import add_experiment, add_json, experiment_of, file_experiment
from nnxdsl.config.core.codegen import render, to_python
from nnxdsl.config.core.serialization import flatten, origins, to_json


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_experiment(parser)
    output = parser.add_mutually_exclusive_group()
    add_json(output)
    output.add_argument("--python", action="store_true", help="print a Python file that builds the experiment")


def run(args: Namespace) -> int:
    """Prints the experiment."""
    args.experiment = original = file_experiment(args)
    experiment = experiment_of(args)
    if args.json:
        sys.stdout.write(to_json(experiment))
    elif args.python:
        sys.stdout.write(to_python(experiment))
    else:
        before, after = flatten(original), origins(experiment)
        set_here = {word.partition("=")[0] for word in args.overrides}
        for path, value in flatten(experiment).items():
            origin = "command line" if path in set_here else after[path]
            if path not in before or before[path] != value:
                origin = f"{origin or 'command line'}; {_original(before, path)}"
            sys.stdout.write(f"{path} = {render(value)}{'    # ' if origin else ''}{origin}\n")
        sys.stdout.write(f"# id: {experiment.id}\n")
    return 0


def _original(before: dict[str, object], path: str) -> str:
    return f"in the file: {render(before[path])}" if path in before else "not in the file"
