"""List all runs and their states."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace

from nnxdsl.cli.arguments import add_home, add_json
from nnxdsl.runs.run_list import list_runs


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_home(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Prints a line for each run."""
    runs = list_runs(args.home)
    if args.json:
        rows = [
            {"id": r.id, "state": r.state, "step": r.step, "total": r.total, "created": r.created, "problem": r.problem}
            for r in runs
        ]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    if not runs:
        sys.stdout.write(f"no runs in {args.home}\n")
    width = max((len(run.id) for run in runs), default=0)
    for run in runs:
        progress = "-" if run.total is None else f"{run.step or 0}/{run.total}"
        line = (
            f"{run.id:<{width}}  {run.state or 'damaged':<8}  {progress:>12}  {run.created or ''}  {run.problem or ''}"
        )
        sys.stdout.write(line.rstrip().encode(errors="backslashreplace").decode() + "\n")
    return 0
