"""Functions whose JSON schemas are compared with those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal


def add(a: int, b: float = 1.0) -> float:
    """Adds two numbers.

    Both are finite.

    Args:
        a: The first.
        b: The second, which may be
            a fraction.

    Returns:
        The sum.
    """
    return a + b


def search(
    query: str,
    kind: Literal["news", "web"],
    limit: int | None = None,
    words: list[str] | None = None,
    options: dict[str, bool | int] | None = None,
) -> list[dict[str, Any]]:
    """Looks something up: in the news, or on the web.

    Args:
        query (str): What to look for: words, or "a phrase".
        kind: Where.
        limit: Most results.
        words: Words that results have.
        options: Further ones.

    Raises:
        ValueError: The query is empty.
    """
    return []


def mixed(value: str | list[int], anything: Any, level: Literal[1, 2, "high"] = 1) -> None:
    """Takes unions.

    Args:
        value: One or several.
        anything: No type.
        level: A level.
    """


class Board:
    """Methods are tools as well."""

    def move(self, column: int, hard: bool = False) -> str:
        """Puts a piece into a column.

        Args:
            column: From 0.
            hard: How.

        Returns:
            The board after it.
        """
        return ""


FUNCTIONS: tuple[Callable[..., Any], ...] = (add, search, mixed, Board.move, Board().move)
