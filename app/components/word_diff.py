"""Two texts with the words marked that only one of them has. Independent of runs."""

from __future__ import annotations

import difflib
import re

from ..html import Child, Html, join, tag

WORDS = re.compile(r"\s+|\w+|[^\w\s]")
COMPARED = 4_000
"""Words of a text above which nothing is marked."""


def word_diff(left: str, right: str, *, strike: bool = True) -> tuple[Html, Html]:
    """Returns both texts with their own words marked: underlined in the first, struck through in the second.

    Args:
        left: A text.
        right: Another text.
        strike: Whether words of the second are struck through; else they are underlined too.

    >>> word_diff("a good day", "a bad day")
    ('a <ins>good</ins> day', 'a <del>bad</del> day')
    """
    one, other = WORDS.findall(left), WORDS.findall(right)
    if max(len(one), len(other)) > COMPARED:
        return join(left), join(right)
    first: list[Child] = []
    second: list[Child] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        left_part, right_part = "".join(one[a:b]), "".join(other[c:d])
        if kind == "equal":
            first.append(left_part)
            second.append(right_part)
            continue
        first.append(tag("ins", left_part) if left_part else None)
        second.append(tag("del" if strike else "ins", right_part) if right_part else None)
    return join(first), join(second)
