"""Export a trained model for transformers, or its adapter for PEFT."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from nnxdsl.cli.arguments import add_allow, add_home, add_json
from nnxdsl.cli.load import run_directory
from nnxdsl.cli.weights_arguments import add_write_flags, enter_run, max_shard_bytes, print_json, weights_path
from nnxdsl.errors import RunError
from nnxdsl.runtime.limits import require_address_space
from nnxdsl.terminal.display import Display

if TYPE_CHECKING:
    from nnxdsl.weights.export import Exported


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_home(parser)
    add_allow(parser)
    if parser.get_default("experiment") is None:
        parser.add_argument("source", metavar="RUN", help="run directory or run id")
    parser.add_argument("directory", metavar="DIR", help="output directory")
    parser.add_argument("--adapter", action="store_true", help="export only the adapter, in PEFT's format")
    add_write_flags(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """Writes the weights and prints what was written."""
    require_address_space()
    target = args.source if args.experiment is None else args.experiment.id
    source = weights_path(target, args.home)
    source, directory = enter_run(source if source.exists() else run_directory(target, args.home), Path(args.directory))
    from nnxdsl.runtime.backend import use_cpu
    from nnxdsl.weights.export import export

    use_cpu()
    if args.adapter and args.max_shard_size is not None:
        raise RunError("--max-shard-size has no effect with --adapter, which is one small file")
    with Display() as display:
        exported = export(
            source,
            directory,
            adapter=args.adapter,
            dtype=args.dtype,
            max_shard_bytes=max_shard_bytes(args),
            quantization=args.quantization,
            display=display,
        )
    if args.json:
        print_json(exported.to_dict())
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(exported)))
    return 0


def _lines(exported: Exported) -> list[str]:
    what = "the adapter, for PEFT" if exported.kind == "adapter" else "the model, for transformers"
    return [
        f"{exported.directory}: {what}, of {exported.run} after {exported.step} steps, in "
        f"{exported.quantization or exported.dtype}",
        *(f"  {name}  {size:,} bytes" for name, size in exported.files.items()),
        f"logits: read back, they differ by at most {exported.difference:.2g} from the run's, of which the largest is "
        f"{exported.largest:.3g}",
        f"tokenizer: {exported.tokenizer}",
        *([f"base: {exported.base}"] if exported.base else []),
        *(f"note: {note}" for note in exported.notes),
    ]
