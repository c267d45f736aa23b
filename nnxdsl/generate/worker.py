"""`python -m nnxdsl.generate.worker RUN --step N`: serve a policy and a comparison model over stdin and stdout.

Requests are JSON lines `{"id": 1, "do": "generate" | "tokens" | "pairs", ...}` (`nnxdsl/generate/answers.py`).
Responses are `{"id": 1, "stage": ...}` for progress, then `{"id": 1, "result": ...}` or `{"id": 1, "error": ...}`.
While it generates, progress also has the text so far (`nnxdsl/generate/streaming.py`), which replaces that of the
message before: `{"id": 1, "stage": ..., "partial": {"policy": {"texts": [...], "tokens": [...], "done": [...]}}}`.
The models are loaded at the first request. The process exits at the end of its standard input, or after --idle seconds
without a request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.generate import answers
from nnxdsl.generate.model_pair import REFERENCE, ModelPair
from nnxdsl.generate.streaming import Partial, Tell
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runtime.compile_cache import compile_cache

DOES: Mapping[str, Callable[[ModelPair, Mapping[str, Any], Tell], dict[str, Any]]] = {
    "generate": answers.generate,
    "tokens": answers.tokens,
    "pairs": answers.pairs,
}
REPORT_SECONDS = 0.3
"""Minimum time between progress messages; those between are left out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve requests until standard input ends or the idle timeout expires; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nnxdsl.generate.worker", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, required=True, help="step of a checkpoint; 0 for the initial policy")
    parser.add_argument(
        "--against", default=REFERENCE, help="reference, another step, or RUN@STEP (default: reference)"
    )
    parser.add_argument("--idle", type=float, default=600, help="exit after this many seconds without a request")
    options = parser.parse_args(argv)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the responses
    directory = options.run.absolute()
    _go_where_it_was_started(directory)
    models: ModelPair | None = None
    with compile_cache(directory.parent, lambda problem: sys.stderr.write(f"{problem}\n")):
        for line in _lines(options.idle):
            report, request = _reporter(output, line), {}
            try:
                request = json.loads(line)
                do = DOES.get(request.get("do"))
                if do is None:
                    raise RunError(f"expected one of {', '.join(DOES)}, got {request.get('do')!r}")
                if models is None:
                    models = ModelPair.open(directory, options.step, options.against, report)
                _answer(output, request, result=do(models, request, report))
            except NnxdslError as error:
                _answer(output, request, error=f"{type(error).__name__}: {error}")
    return 0


def _lines(idle: float) -> Iterator[str]:
    """Lines of standard input, until it ends or no line arrives for `idle` seconds."""
    pending = b""
    while True:
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            yield line.decode("utf-8", errors="replace")
        if not select.select([0], [], [], idle)[0]:
            return
        data = os.read(0, 1 << 16)
        if not data:
            return
        pending += data


def _reporter(output: Any, line: str) -> Tell:
    last = 0.0

    def report(stage: str, partial: Mapping[str, Partial] | None = None) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            news = {} if partial is None else {"partial": partial}
            _answer(output, json.loads(line), stage=stage, **news)

    return report


def _answer(output: Any, request: Mapping[str, Any], **fields: Any) -> None:
    output.write(json.dumps({"id": request.get("id"), **fields}) + "\n")


def _go_where_it_was_started(directory: Path) -> None:
    """Change to the run's start directory, to which relative paths in its experiment refer."""
    with contextlib.suppress(OSError):
        os.chdir(RunDirectory(directory).working_directory() or ".")


if __name__ == "__main__":
    sys.exit(main())
