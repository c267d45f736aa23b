"""Sampled completions of runs: which steps a `rollouts.jsonl` has, and the groups of one step. Independent of pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nnxdsl.storage.jsonl import open_plain
from nnxdsl.storage.records import ROLLOUT, problem_in

from .growing import GrowingFiles

NAME = "rollouts.jsonl"
_STEP = re.compile(rb'\{"step": (\d{1,18}), ')
"""Of the beginning of a row, which is enough to list it: texts are parsed when they are shown."""


Places = dict[int, list[tuple[int, int]]]  # offset and length of the rows of each step


class Rollouts:
    """A cache of where the rows of recently viewed runs are."""

    def __init__(self) -> None:
        self._places = GrowingFiles[Places](dict, _add)

    def steps(self, path: Path) -> list[int]:
        """Steps with rows in a `rollouts.jsonl`, ascending; empty without the file, raises if it cannot be read."""
        return sorted([*self._places.of(path)])

    def groups(self, path: Path, step: int) -> list[dict[str, Any]]:
        """Rows of a step, as `nnxdsl.storage.records.ROLLOUT` describes them; invalid ones are left out."""
        places = [*self._places.of(path).get(step, ())]
        groups: list[dict[str, Any]] = []
        try:
            with open(open_plain(path), "rb") as file:
                for offset, length in places:
                    file.seek(offset)
                    if (row := _row(file.read(length))) is not None:
                        groups.append(row)
        except FileNotFoundError:
            return []
        return sorted(groups, key=lambda row: row["group"])


def _add(places: Places, lines: list[bytes], offset: int) -> None:
    for line in lines:
        if (begin := _STEP.match(line)) is not None:
            places.setdefault(int(begin[1]), []).append((offset, len(line)))
        offset += len(line)


def _row(line: bytes) -> dict[str, Any] | None:
    """A row with texts that can be shown: a lone surrogate in them becomes a question mark."""
    try:
        row = json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    is_good = isinstance(row, dict) and problem_in(row, ROLLOUT, required=tuple(ROLLOUT)) is None
    return row if is_good and row["completions"] else None
