"""How much of its bound each comparison of two numbers used: a bound that a machine nearly uses up fails on another.

`pytest --bounds=FILE ...` writes, for each line that compares with `np.testing.assert_allclose` or `pytest.approx`, the
largest share of its bound that any of its comparisons used, and prints those of more than a quarter.
`python -m tests.bounds FILE ...` prints the largest of several runs: other instruction sets (`XLA_FLAGS`), other
versions, other numbers of threads.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LOOKED_AT = 0.25
"""A comparison that uses more of its bound than this share is looked at."""

HERE = Path(__file__).parent
ApproxScalar: Any = type(pytest.approx(1.0))
Shares = dict[str, tuple[float, str]]
"""`file:line` -> the largest share of the bound, and the test that used it."""


def larger(into: Shares, result: Shares) -> None:
    """Adds `result` to `into`, keeping the larger share of each line."""
    for place, (share, test) in result.items():
        if place not in into or share > into[place][0]:
            into[place] = (share, test)


def report(shares: Shares, least: float = LOOKED_AT) -> Iterator[str]:
    """Yields a line for each comparison that used `least` of its bound or more, the largest first."""
    for place, (share, test) in sorted(shares.items(), key=lambda item: -item[1][0]):
        if share >= least:
            yield f"{share:8.1%}  {place}  {test}"


def _place() -> str:
    """Returns `file:line` of the comparison in a test, or an empty string outside of tests."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(HERE) and path != Path(__file__):
            return f"{path.relative_to(HERE.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Bounds:
    """The pytest plugin behind `--bounds=FILE`."""

    def __init__(self) -> None:
        self.shares: Shares = {}

    def note(self, share: float) -> None:
        """Records one comparison; `share` is the difference over what is allowed."""
        place = _place()
        if place and math.isfinite(share):
            larger(self.shares, {place: (share, os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)"))})

    def watch(self) -> None:
        """Replaces the two comparisons by ones that are recorded, too."""
        assert_allclose, equal = np.testing.assert_allclose, ApproxScalar.__eq__

        def watched_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, **options: Any) -> None:
            kind = np.complex128 if np.iscomplexobj(actual) or np.iscomplexobj(desired) else np.float64
            got, wanted = np.asarray(actual, kind), np.asarray(desired, kind)
            allowed = atol + rtol * np.abs(wanted)
            if np.any(allowed > 0):
                with np.errstate(invalid="ignore"):
                    away = np.broadcast_to(np.abs(got - wanted), np.broadcast(got, wanted).shape)
                allowed = np.broadcast_to(allowed, away.shape)
                counted = np.isfinite(away) & (allowed > 0)
                if counted.any():
                    self.note(float((away[counted] / allowed[counted]).max()))
            assert_allclose(actual, desired, rtol=rtol, atol=atol, **options)

        def watched_equal(approx: ApproxScalar, actual: Any) -> bool:
            try:
                allowed = float(approx.tolerance)
                if 0 < allowed < math.inf and sys._getframe(1).f_code.co_name != "__ne__":
                    self.note(abs(float(approx.expected) - float(actual)) / allowed)
            except (TypeError, ValueError):  # not numbers
                pass
            return equal(approx, actual)

        np.testing.assert_allclose = watched_allclose
        ApproxScalar.__eq__ = watched_equal

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["bounds"] = self.shares  # type: ignore[attr-defined]
        else:
            Path(session.config.getoption("bounds")).write_text(json.dumps(self.shares, indent=0), encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        larger(self.shares, getattr(node, "workeroutput", {}).get("bounds", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(f"comparisons that used {LOOKED_AT:.0%} of their bound or more")
        for line in report(self.shares):
            terminalreporter.write_line(line)


def main(files: list[str]) -> None:
    """Prints the largest shares of several runs."""
    shares: Shares = {}
    for file in files:
        larger(shares, json.loads(Path(file).read_text(encoding="utf-8")))
    print(f"{len(shares)} lines compare numbers; these used {LOOKED_AT:.0%} of their bound or more:")
    print("\n".join(report(shares)))


if __name__ == "__main__":
    main(sys.argv[1:])
