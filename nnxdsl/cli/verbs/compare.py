"""Compare weights of two formats, array by array; exit code 1 where they differ."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from nnxdsl.cli.arguments import add_allow, add_home, add_json
from nnxdsl.cli.weights_arguments import enter_run, print_json, weights_path
from nnxdsl.runtime.limits import require_address_space

if TYPE_CHECKING:
    from nnxdsl.weights.compare import Difference

DIFFERENT = 1
"""Exit code if weights differ."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_home(parser)
    add_allow(parser)
    parser.add_argument("first", metavar="A", help="weights: a directory or a run")
    parser.add_argument("second", metavar="B", help="other weights")
    parser.add_argument("--rtol", type=float, metavar="R", help="relative tolerance")
    parser.add_argument("--atol", type=float, metavar="A", help="absolute tolerance")
    add_json(parser)


def run(args: Namespace) -> int:
    """Prints every array that differs."""
    require_address_space()
    first, second = enter_run(weights_path(args.first, args.home), weights_path(args.second, args.home))
    from nnxdsl.runtime.backend import use_cpu
    from nnxdsl.weights.compare import compare

    use_cpu()
    rows: list[dict[str, Any]] = []
    count = different = 0
    for difference in compare(first, second, rtol=args.rtol, atol=args.atol):
        count += 1
        different += difference.verdict != "same"
        if args.json:
            rows.append(difference.to_dict())
        elif difference.verdict != "same":
            sys.stdout.write(_line(difference) + "\n")
    if args.json:
        print_json({"same": different == 0, "arrays": rows})
    else:
        verdict = "all the same" if not different else f"{different} of them differ{'s' if different == 1 else ''}"
        sys.stdout.write(f"# {count} arrays, {verdict}\n")
    return DIFFERENT if different else 0


def _line(difference: Difference) -> str:
    if difference.verdict != "differs":
        number = difference.verdict == "only in the second"
        return f"{difference.path}: {difference.verdict}: {difference.dtypes[number]} {difference.shapes[number]}"
    parts: list[str] = []
    if difference.shapes[0] != difference.shapes[1]:
        parts.append(f"shape {difference.shapes[0]} and {difference.shapes[1]}")
    if difference.dtypes[0] != difference.dtypes[1]:
        parts.append(f"dtype {difference.dtypes[0]} and {difference.dtypes[1]}")
    if difference.count:
        values = f"{difference.count:,} value{'' if difference.count == 1 else 's'}"
        parts.append(f"{values}, by up to {difference.largest:.3g}, relatively {difference.relative:.3g}")
    return f"{difference.path}: {'; '.join(parts)}"
