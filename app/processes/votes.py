"""Votes on pairs of answers, in an append-only file. Independent of pages."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.errors import RunError

from ..store.growing import LastRows
from .outputs_worker import Model, Request

SIDES = ("policy", "other")


def samples_of(result: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    """All answers of one side."""
    return [result[side], *result[side].get("more", ())]


def are_equal(result: Mapping[str, Any]) -> bool:
    """Whether both models gave the same answers, token for token."""
    both = zip(*(samples_of(result, side) for side in SIDES), strict=True)
    return all(one["ids"] == other["ids"] for one, other in both)


class Votes:
    """All votes of an app's home; only the last vote on an answer counts."""

    def __init__(self, path: Path) -> None:
        self._rows = LastRows(path, "key", "for")

    def order(self, key: str) -> tuple[str, str]:
        """Display order of the two sides in a blind comparison: pseudo-random, and fixed per answer."""
        is_turned = hashlib.sha256(f"order {key}".encode()).digest()[0] & 1
        return (SIDES[1], SIDES[0]) if is_turned else SIDES

    def add(self, request: Request, choice: str, *, is_blind: bool) -> str:
        """Records a vote, and returns the side that it is for: "policy", "other" or "tie", as on equal answers.

        The choice is "a" or "b", by the order in which the answers were shown, or "tie"; raises for any other.
        """
        if choice not in ("a", "b", "tie"):
            raise RunError("vote for a, b or tie")
        is_tie = choice == "tie" or (request.result is not None and are_equal(request.result))
        order = self.order(request.key) if is_blind else SIDES
        whose = "tie" if is_tie else order["ab".index(choice)]
        self._rows.append({"key": request.key, **attrs.asdict(request.model), "for": whose, "blind": is_blind})
        return whose

    def choice(self, key: str) -> str | None:
        """The side that the vote on an answer is for; None without a vote."""
        return self._rows.all().get(key, {}).get("for")

    def tally(self, model: Model, *, blind_only: bool = False) -> dict[str, int]:
        """Number of votes for each side, of all or of blind ones."""
        about = attrs.asdict(model) | ({"blind": True} if blind_only else {})
        counts = Counter(row.get("for") for row in self._rows.all().values() if about.items() <= row.items())
        return {name: counts[name] for name in (*SIDES, "tie")}
