"""Reads new rows of `metrics.jsonl` for one tracker: each once and in order, however often the run was resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from nnxdsl.storage.jsonl import open_plain
from nnxdsl.storage.records import is_integer, is_number

_BLOCK = 2**18
"""Bytes per read: some hundred rows, after which a tracker is flushed."""
_NO_METRICS = ("step", "attempt")


class Position(NamedTuple):
    """The place of a row: an evaluation comes before the training step of the same number."""

    step: int
    is_training: bool


START = Position(-1, True)
"""Before all rows."""


class Feed:
    """Reads a growing file. Rows up to a position are skipped, since steps are trained again after a resume.

    The file is opened once: the next attempt replaces it by another one, and may do so while this one is read.
    """

    def __init__(self, path: Path, position: Position) -> None:
        """Opens nothing yet.

        Args:
            path: The file, which may not exist yet.
            position: Of the last row that the tracker has.
        """
        self.position = position
        self._path = path
        self._file: int | None = None
        self._offset = 0

    def read(self) -> list[tuple[int, dict[str, float]]] | None:
        """Steps and metrics of the next block of rows; None if there is no new row yet."""
        if self._file is None:
            try:
                self._file = open_plain(self._path)
            except FileNotFoundError:
                return None
        lines = self._lines(self._file)
        return None if lines is None else [row for line in lines if (row := self._row(line)) is not None]

    def _lines(self, file: int) -> list[bytes] | None:
        """The next complete lines. An incomplete one is read again: the trainer may cut it off."""
        size = _BLOCK
        while True:
            block = os.pread(file, size, self._offset)
            end = block.rfind(b"\n") + 1
            if end:
                self._offset += end
                return block[:end].splitlines()
            if len(block) < size:
                return None
            size *= 2

    def _row(self, line: bytes) -> tuple[int, dict[str, float]] | None:
        """Step and metrics of a line; None for one that is skipped or damaged, which the trainer reports."""
        try:
            row: Any = json.loads(line)
        except ValueError:
            return None
        if not isinstance(row, dict) or not is_integer(row.get("step")):
            return None
        position = Position(row["step"], row.get("kind") != "evaluation")
        if position <= self.position:
            return None
        self.position = position
        metrics = {name: value for name, value in row.items() if is_number(value) and name not in _NO_METRICS}
        return position.step, metrics
