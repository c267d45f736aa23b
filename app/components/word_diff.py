"""Two texts with the words marked that only one of them has. Independent of runs."""

from __future__ import annotations

import difflib
import re

from ..markup import Child, Html, join, tag

PIECES = re.compile(r"\s+|\w+|[^\w\s]")
COMPARED = 4_000  # words of a text above which nothing is marked


def word_diff(left: str, right: str, *, strike: bool = True) -> tuple[Html, Html]:
    """Returns both texts with their own words underlined; those of the second are struck through, unless told else.

    >>> word_diff("a good day", "a bad day")
    ('a <ins>good</ins> day', 'a <del>bad</del> day')
    """
    one, other = PIECES.findall(left), PIECES.findall(right)
    if max(len(one), len(other)) > COMPARED:
        return join(left), join(right)
    first: list[Child] = []
    second: list[Child] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        for parts, mark, text in ((first, "ins", one[a:b]), (second, "del" if strike else "ins", other[c:d])):
            parts.append("".join(text) if kind == "equal" or not text else tag(mark, "".join(text)))
    return join(first), join(second)
