"""Shared by the verbs that read or write weights: flags and path resolution."""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_write_flags(parser: ArgumentParser) -> None:
    """Adds `--dtype`, `--quantization` and `--max-shard-size`."""
    parser.add_argument("--dtype", metavar="NAME", help="dtype to write: float32, bfloat16 or float16")
    parser.add_argument(
        "--quantization", metavar="NAME", help="format of linear layers' weights: fp8, mxfp4, int8 or int4"
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="maximum size of one file: 5GB, 500MB")


def max_shard_bytes(args: Namespace) -> int | None:
    """The value of `--max-shard-size` in bytes; None if it is not given.

    Raises:
        RunError: the value is not a size.
    """
    if args.max_shard_size is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|B)?", args.max_shard_size, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "B").upper()]) if match else 0
    if size < 1:
        raise RunError(f"--max-shard-size: expected a size such as 5GB or 500MB, got '{args.max_shard_size}'")
    return size


def weights_path(target: str, home: Path) -> Path:
    """Resolve a path to weights; a name that is not a path is a run id in `home`."""
    path = Path(target)
    return home / path if not path.exists() and (home / path / "run.json").is_file() else path


def enter_run(source: Path, other: Path) -> tuple[Path, Path]:
    """Change to the start directory of the source's run, to which relative paths in its experiment refer.

    Returns:
        Both paths, absolute if the working directory was changed.
    """
    run = next((place for place in (source, *source.parents[:2]) if (place / "run.json").is_file()), None)
    started = RunDirectory(run).working_directory() if run else None
    if started is None or started.resolve() == Path.cwd():
        return source, other
    absolute = source.absolute(), other.absolute()
    os.chdir(started)
    return absolute


def print_json(value: Any) -> None:
    """Print JSON on standard output."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")
