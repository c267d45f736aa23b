"""Plan steps, tokens, parameters, memory and shardings, without touching a device.

With --device (and --count), check whether the run fits in memory; --search lists meshes, micro-batch sizes and
rematerialization policies that fit, fastest first.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from nnxdsl.cli.arguments import UsageError, add_experiment, add_json, experiment_of, positive
from nnxdsl.runtime.limits import require_address_space


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_experiment(parser)
    add_json(parser)
    parser.add_argument("--device", metavar="NAME", help="device to plan for: h200, v5e, ...")
    parser.add_argument("--count", type=positive, metavar="N", help="number of devices")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--compile", action="store_true", help="ahead-of-time compile for the device on this machine")
    output.add_argument("--search", action="store_true", help="search for placements that fit, fastest first")
    output.add_argument("--why", metavar="PATH", help="show every sharding rule tried for an array")
    output.add_argument("--draw", metavar="PATH", help="draw which device has which block of an array")
    output.add_argument("--dump", action="store_true", help="print the layout, one line per array")
    output.add_argument("--warnings", action="store_true", help="print all warnings in full")
    parser.add_argument("--arrays", action="store_true", help="list all arrays, their shapes and shardings")
    parser.add_argument(
        "--match", action="append", metavar="PATH", help="list arrays of this path, group or pattern; can be repeated"
    )
    parser.add_argument(
        "--limit", type=positive, metavar="S", help="with --compile: time limit in seconds (default: 300)"
    )


def run(args: Namespace) -> int:
    """Print the plan, or the part of it that the flags select."""
    arrays = args.arrays or args.match
    if args.json and (args.why is not None or args.draw is not None or args.dump or args.warnings or arrays):
        raise UsageError("--json excludes --why, --draw, --dump, --warnings, --arrays and --match")
    if arrays and (args.why is not None or args.draw is not None or args.dump or args.warnings or args.search):
        raise UsageError("--arrays and --match go with the plan, or with --compile")
    if args.limit is not None and not args.compile:
        raise UsageError("--limit has no effect without --compile")
    require_address_space()
    experiment = experiment_of(args)
    from nnxdsl.cli.plan import plan_command

    return plan_command(experiment, args)
