"""Directories that appear whole or not at all, and never over something else; knows no formats."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from nnxdsl.errors import RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import sync_directory

_HALF = re.compile(r"\.writing-(?P<pid>\d+)-(?P<started>\d+)-(?P<name>.+)")


def require_vacant(target: Path) -> None:
    """Refuses a place where something is; an empty directory is nothing.

    Raises:
        RunError: names it.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RunError(f"{target}: is there already; nothing is written over: name a new directory")
    if target.is_dir() and any(target.iterdir()):
        raise RunError(f"{target}: holds files already; nothing is written over: name a new directory")


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A directory beside `target` to write in, which gets its name when the block ends well, and else goes.

    A kill leaves it under a hidden name, which the next to write there sweeps away.

    Args:
        target: where the directory will be; its parents are made.

    Raises:
        RunError: something is there already, or the disk will not take it; nothing is there afterwards.
    """
    require_vacant(target)
    me = process_info.current()
    temporary = target.parent / f".writing-{me.pid}-{me.started or 0}-{target.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        require_vacant(target)
        os.rename(temporary, target)  # onto nothing or an empty directory; anything else refuses
        sync_directory(target.parent)
    except OSError as error:
        raise RunError(f"{target}: cannot be written, and nothing was left there: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Removes what killed writers of the same place left behind."""
    for path in target.parent.glob(".writing-*"):
        match = _HALF.fullmatch(path.name)
        if match is None or match["name"] != target.name:
            continue
        if not process_info.is_alive(int(match["pid"]), int(match["started"]) or None):
            shutil.rmtree(path, ignore_errors=True)


def _sync(place: Path) -> None:
    """Brings every file below `place`, and every name, to the disk."""
    for directory, _, names in os.walk(place):
        for name in names:
            with (Path(directory) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(directory))
