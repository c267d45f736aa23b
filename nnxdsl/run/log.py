"""`log.txt`: what a run told people, with the time of each line; knows no terminal and nothing of what is told."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from nnxdsl.run.display import clean
from nnxdsl.run.process import redact, utc


class Log:
    """Lines with their time, on their way to the disk when `write` returns; a context manager.

    What cannot be written is lost without a word: a full disk shows where it matters, in metrics and checkpoints.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, at its end."""
        self._file = path.open("a", encoding="utf-8")

    def write(self, text: str) -> None:
        """Adds a text, secrets blotted out; its further lines are indented."""
        first, *rest = redact(clean(text)).splitlines() or [""]
        lines = [f"{utc()}  {first}", *(f"    {line}" for line in rest)]
        with contextlib.suppress(OSError):
            self._file.write("".join(f"{line}\n" for line in lines))
            self._file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
