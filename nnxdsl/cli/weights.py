"""What the commands `export`, `convert` and `compare` do and print; words are parsed in `nnxdsl/cli/dispatch.py`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import attrs
import jax

from nnxdsl.errors import RunError
from nnxdsl.terminal.display import Display
from nnxdsl.weights.compare import Difference, compare
from nnxdsl.weights.convert import convert
from nnxdsl.weights.export import Exported, export

DIFFERENT = 1
"""Exit code where weights differ."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@attrs.frozen(kw_only=True)
class ExportArgs:
    """Flags of what writes weights; None where they were not given."""

    dtype: str | None
    max_shard_size: str | None
    as_json: bool

    @property
    def max_shard_bytes(self) -> int | None:
        """The size as a number.

        Raises:
            RunError: it is none.
        """
        if self.max_shard_size is None:
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|B)?", self.max_shard_size, re.IGNORECASE)
        size = int(float(match[1]) * _UNITS[(match[2] or "B").upper()]) if match else 0
        if size < 1:
            raise RunError(f"--max-shard-size: expected a size such as 5GB or 500MB, got '{self.max_shard_size}'")
        return size


def export_command(run: Path, directory: Path, asked: ExportArgs, *, adapter: bool) -> int:
    """Writes what a run learnt, says what was written, and returns the process's exit code."""
    _on_the_host()
    if adapter and asked.max_shard_size is not None:
        raise RunError("--max-shard-size has no effect with --adapter, which is one small file")
    with Display() as display:
        found = export(
            run,
            directory,
            adapter=adapter,
            dtype=asked.dtype or "float32",
            max_shard_bytes=asked.max_shard_bytes,
            display=display,
        )
    if asked.as_json:
        _print_json(found.to_dict())
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _exported(found)))
    return 0


def convert_command(source: Path, directory: Path, asked: ExportArgs, *, to: str, unrolled: bool) -> int:
    """Writes weights in another format, says what was written, and returns the process's exit code."""
    _on_the_host()
    with Display() as display:
        found = convert(
            source,
            directory,
            to,  # pyright: ignore[reportArgumentType] - refused there, if it is no format
            dtype=asked.dtype,
            max_shard_bytes=asked.max_shard_bytes,
            unrolled=unrolled,
            display=display,
        )
    if asked.as_json:
        _print_json(found.to_dict())
        return 0
    what = f"{found.to}, from {found.kind} {found.source}"
    sys.stdout.write(f"{found.directory}: {what}: {found.arrays} arrays, {found.size:,} bytes\n")
    sys.stdout.write("".join(f"note: {note}\n" for note in found.notes))
    return 0


def compare_command(first: Path, second: Path, *, rtol: float | None, atol: float | None, as_json: bool) -> int:
    """Compares weights array by array; the exit code is 1 where any differ."""
    _on_the_host()
    rows: list[dict[str, Any]] = []
    count = apart = 0
    for found in compare(first, second, rtol=rtol, atol=atol):
        count += 1
        apart += found.verdict != "same"
        if as_json:
            rows.append(found.to_dict())
        elif found.verdict != "same":
            sys.stdout.write(_difference(found) + "\n")
    if as_json:
        _print_json({"same": apart == 0, "arrays": rows})
    else:
        verdict = "all the same" if not apart else f"{apart} of them differ{'s' if apart == 1 else ''}"
        sys.stdout.write(f"# {count} arrays, {verdict}\n")
    return DIFFERENT if apart else 0


def _difference(found: Difference) -> str:
    if found.verdict != "differs":
        number = found.verdict == "only in the second"
        return f"{found.path}: {found.verdict}: {found.dtypes[number]} {found.shapes[number]}"
    parts = []
    if found.shapes[0] != found.shapes[1]:
        parts.append(f"shape {found.shapes[0]} and {found.shapes[1]}")
    if found.dtypes[0] != found.dtypes[1]:
        parts.append(f"dtype {found.dtypes[0]} and {found.dtypes[1]}")
    if found.count:
        values = f"{found.count:,} value{'' if found.count == 1 else 's'}"
        parts.append(f"{values}, by up to {found.largest:.3g}, relatively {found.relative:.3g}")
    return f"{found.path}: {'; '.join(parts)}"


def _exported(found: Exported) -> list[str]:
    what = "the adapter, for PEFT" if found.kind == "adapter" else "the model, for transformers"
    return [
        f"{found.directory}: {what}, as {found.run} had it after {found.step} steps, in {found.dtype}",
        *(f"  {name}  {size:,} bytes" for name, size in found.files.items()),
        f"logits: read back, they are at most {found.difference:.2g} from the run's, of which the largest is "
        f"{found.largest:.3g}",
        f"tokenizer: {found.tokenizer}",
        *([f"base: {found.base}"] if found.base else []),
        *(f"note: {note}" for note in found.notes),
    ]


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _on_the_host() -> None:
    """Weights on their way between files must not take memory from a run on the same machine."""
    jax.config.update("jax_platforms", "cpu")
