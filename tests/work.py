"""Work that a test compares with other work: calls counted, so that the verdict is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def calls(function: Callable[[], object]) -> int:
    """Returns how many functions, of Python and of C, a call of `function` calls in this thread."""
    count = 0

    def profile(_frame: object, event: str, _value: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
