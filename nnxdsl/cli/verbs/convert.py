"""Convert weights to another format: hub (transformers), checkpoint or linen."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nnxdsl.cli.arguments import UsageError, add_allow, add_home, add_json
from nnxdsl.cli.weights_arguments import add_write_flags, enter_run, max_shard_bytes, print_json, weights_path
from nnxdsl.runtime.limits import require_address_space
from nnxdsl.terminal.display import Display


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_home(parser)
    add_allow(parser)
    parser.add_argument("source", metavar="SRC", help="weights to read: a directory or a run")
    parser.add_argument("directory", metavar="DIR", help="output directory")
    parser.add_argument("--to", metavar="FORMAT", help="output format: hub, checkpoint or linen")
    parser.add_argument("--unrolled", action="store_true", help="with --to linen: unstack the layers")
    add_write_flags(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Writes the weights and prints what was written."""
    if args.to is None:
        raise UsageError("convert needs a format: --to hub, --to checkpoint or --to linen")
    require_address_space()
    source, directory = enter_run(weights_path(args.source, args.home), Path(args.directory))
    from nnxdsl.runtime.backend import use_cpu
    from nnxdsl.weights.convert import convert

    use_cpu()
    with Display() as display:
        converted = convert(
            source,
            directory,
            args.to,
            dtype=args.dtype,
            max_shard_bytes=max_shard_bytes(args),
            unrolled=args.unrolled,
            quantization=args.quantization,
            display=display,
        )
    if args.json:
        print_json(converted.to_dict())
        return 0
    what = f"{converted.to}, from {converted.kind} {converted.source}"
    sys.stdout.write(f"{converted.directory}: {what}: {converted.arrays} arrays, {converted.size:,} bytes\n")
    sys.stdout.write("".join(f"note: {note}\n" for note in converted.notes))
    return 0
