"""The process that compares answers in mathematics, one line of JSON in and one out; run by its path.

math-verify hands answers to sympy, which a single completion such as `9^{9^{9^{9}}}` holds for hours in code that no
exception reaches. So it is a process of its own: the alarm of an answer that takes too long ends it, and the next
answer has another one. Imports nothing of nnxdsl.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import resource
import signal
import sys
from typing import Any

MEMORY = 8 << 30
"""Bytes of addresses that it may have: an expression that needs more is no right answer."""


def main() -> None:
    """Answers requests `[completion, right answer, seconds]` until its input ends."""
    from latex2sympy2_extended import NormalizationConfig  # noqa: PLC0415 - an error is told through the pipe
    from math_verify import LatexExtractionConfig, parse, verify  # noqa: PLC0415

    logging.disable(logging.CRITICAL)  # it warns of time-outs that are off
    for stop in (signal.SIGINT, signal.SIGTERM):  # meant for the run, whose end closes the pipe
        signal.signal(stop, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # where less is allowed already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # As TRL's accuracy_reward: LaTeX alone, with \boxed{} first.
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    @functools.lru_cache(4096)
    def right(answer: str) -> list[Any]:
        return parse(answer, parsing_timeout=0)

    def compared(completion: str, answer: str) -> tuple[bool | None, str, str]:
        gold = right(answer)
        if not gold:
            return None, "", ""
        parsed = parse(completion, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=0)
        return bool(verify(gold, parsed, timeout_seconds=0)), str(gold), str(parsed) if parsed else ""

    for line in sys.stdin:
        completion, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its default action ends the process, whatever it is at
        try:
            reply = compared(completion, answer)
        except (MemoryError, RecursionError):
            reply = (False, "", "")
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
