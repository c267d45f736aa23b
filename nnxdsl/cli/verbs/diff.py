"""Show what differs between two experiments, and whether they are the same run."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace

from nnxdsl.cli.arguments import add_json, add_overrides, add_target, experiment_of
from nnxdsl.cli.load import load
from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.serialization import diff, get


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_target(parser)
    parser.add_argument("other", metavar="OTHER", help="file or run to compare with")
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--layout", action="store_true", help="show the arrays whose sharding differs instead")


def run(args: Namespace) -> int:
    """Prints the differing fields, or the differing arrays of the layouts."""
    left, right = experiment_of(args), load(args.other, args.home)
    if args.layout:
        from nnxdsl.cli.plan import diff_layouts

        return diff_layouts(left, right, as_json=args.json)
    changes = {path: (get(left, path), value) for path, value in diff(left, right).items()}
    if args.json:
        plain = {path: {"left": render(old), "right": render(new)} for path, (old, new) in changes.items()}
        sys.stdout.write(json.dumps({"same_run": left.id == right.id, "changes": plain}, indent=2) + "\n")
        return 0
    for path, (old, new) in changes.items():
        sys.stdout.write(f"{path}: {render(old)} -> {render(new)}\n")
    count = f"{len(changes)} difference{'' if len(changes) == 1 else 's'}" if changes else "no differences"
    verdict = f"the same run: {left.id}" if left.id == right.id else f"different runs: {left.id}, {right.id}"
    sys.stdout.write(f"# {count}; {verdict}\n")
    return 0
