"""Starts the process of a run for every engine, with its output and its exit code in files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnxdsl.launch.job import Job
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import write_json


def output_file(directory: Path, rank: int = 0) -> Path:
    """The file with the output of a process of a job."""
    return directory / f"output{_suffix(rank)}.txt"


def end_file(directory: Path, rank: int = 0) -> Path:
    """The file with the exit code of a process of a job."""
    return directory / f"ended{_suffix(rank)}.json"


def start(
    arguments: Sequence[str],
    output: Path,
    *,
    cwd: Path | str | None,
    environment: Mapping[str, str],
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Starts `python ARGUMENTS` with its output appended to a file.

    Args:
        arguments: What follows the interpreter.
        output: The file.
        cwd: The working directory; None for this process's own.
        environment: All variables of the environment.
        options: Further arguments of `subprocess.Popen`.
    """
    with output.open("ab") as file:
        return subprocess.Popen[bytes](
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            **options,
        )


def write_end(directory: Path, exit_code: int, rank: int = 0) -> None:
    """Writes the exit code of a process."""
    write_json(end_file(directory, rank), {"exit_code": exit_code, "time": process_info.utc()})


def recorded_exit_code(job: Job) -> int | None:
    """The exit code of a job's first process, where `write_end` has written it."""
    code = job.read(end_file(job.directory).name).get("exit_code")
    return code if isinstance(code, int) else None


def _suffix(rank: int) -> str:
    return "" if rank == 0 else f".{rank}"
