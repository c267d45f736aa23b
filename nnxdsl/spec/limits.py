"""Ranges of single fields, as attrs validators that can also describe themselves to a form."""

from __future__ import annotations

import re

import attrs


@attrs.frozen
class Limit:
    """A closed or half-open range, or a pattern; called by attrs, and by `base` to collect all problems.

    Raises:
        ValueError: with the sentence that the user reads.
    """

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    pattern: str | None = None

    def __call__(self, _instance: object, _attribute: object, value: object) -> None:
        if value is None:
            return
        if self.pattern is not None:
            if not re.fullmatch(self.pattern, str(value)):
                raise ValueError(f"expected {self.describe()}, got {value!r}")
            return
        assert isinstance(value, int | float)
        inside = (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )
        if not inside:
            raise ValueError(f"expected {self.describe()}, got {value!r}")

    def describe(self) -> str:
        """The range in words, such as `a value > 0 and <= 1`."""
        if self.pattern is not None:
            return f"text that matches {self.pattern}"
        bounds = ((">", self.above), (">=", self.at_least), ("<", self.below), ("<=", self.at_most))
        return "a value " + " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


positive = Limit(above=0)
"""Greater than zero."""

not_negative = Limit(at_least=0)
"""Zero or more."""

fraction = Limit(at_least=0, at_most=1)
"""Between 0 and 1, both included."""

probability = Limit(at_least=0, below=1)
"""Between 0 (included) and 1 (excluded)."""

name = Limit(pattern=r"[a-z0-9][a-z0-9._-]{0,63}")
"""A name that is also safe as part of a directory name."""
