"""Ranges of single fields, as attrs validators that can also describe themselves to a form."""

from __future__ import annotations

import re

import attrs


@attrs.frozen
class Limit:
    """A closed or half-open range, or a pattern; called by attrs, and by `base` to collect all problems.

    Attributes:
        above: Values must be greater.
        at_least: Values must be as great or greater.
        below: Values must be smaller.
        at_most: Values must be as small or smaller.
        pattern: Regular expression that the whole text must match.
        description: What the pattern means, for messages.
    """

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    pattern: str | None = None
    description: str = ""

    def __call__(self, _instance: object, _attribute: object, value: object) -> None:
        """Check one value; None is always within the limit, since the field's type decides whether it may be None.

        Raises:
            ValueError: with the sentence that the user reads.
        """
        if value is not None and not self._holds(value):
            raise ValueError(f"expected {self.describe()}, got {value!r}")

    def _holds(self, value: object) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, str(value), re.DOTALL) is not None
        assert isinstance(value, int | float)
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def describe(self) -> str:
        """The range in words, such as `a value > 0 and <= 1`."""
        if self.pattern is not None:
            return self.description or f"text that matches {self.pattern}"
        bounds = ((">", self.above), (">=", self.at_least), ("<", self.below), ("<=", self.at_most))
        return "a value " + " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


positive = Limit(above=0)
"""Greater than zero."""

not_negative = Limit(at_least=0)
"""Zero or more."""

fraction = Limit(at_least=0, at_most=1)
"""Between 0 and 1, both included."""

inner = Limit(above=0, below=1)
"""Between 0 and 1, both excluded."""

probability = Limit(at_least=0, below=1)
"""Between 0 (included) and 1 (excluded)."""

filled = Limit(pattern=r".*\S.*", description="text that is not blank")
"""Text with something in it."""

server_url = Limit(pattern=r"https?://\S+(?<!/v1)(?<!/v1/)", description="a URL without /v1, as http://localhost:8000")
"""Where a server listens."""

function_name = Limit(
    pattern=r"[^:]*[^:\s][^:]*|([^\W\d]\w*\.)*[^\W\d]\w*:[^\W\d]\w*(\.[^\W\d]\w*)*",
    description="a registered name without ':', or module:function",
)
"""The name of a function that is registered, or that is imported from a module."""

name = Limit(
    pattern=r"[a-z0-9][a-z0-9._-]{0,63}",
    description="1 to 64 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit",
)
"""A name that is also safe as part of a directory name."""
