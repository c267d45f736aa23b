"""Directories that are written atomically: complete or absent, and never over existing files."""

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

_TEMPORARY = re.compile(r"\.writing-(?P<pid>\d+)-(?P<started>\d+)-(?P<name>.+)")


def require_vacant(target: Path) -> None:
    """Refuses a path that exists, unless it is an empty directory.

    Raises:
        RunError: Names the path.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RunError(f"{target}: already exists and is not overwritten; name a new directory")
    if target.is_dir() and any(target.iterdir()):
        raise RunError(f"{target}: is not empty and is not overwritten; name a new directory")


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside `target`, renamed to it when the block ends without an error, else deleted.

    A kill leaves it under a hidden name; the next writer of the same target deletes it.

    Args:
        target: The final path; missing parents are created.

    Raises:
        RunError: The path already exists, or a write failed; nothing is left at the path.
    """
    require_vacant(target)
    me = process_info.current()
    temporary = target.parent / f".writing-{me.pid}-{me.started or 0}-{target.name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _delete_leftovers(target)
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        require_vacant(target)
        os.rename(temporary, target)  # fails unless the target is missing or an empty directory
        sync_directory(target.parent)
    except OSError as error:
        raise RunError(f"{target}: cannot be written; no files were left behind: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _delete_leftovers(target: Path) -> None:
    """Deletes temporary directories of killed writers of the same target."""
    for path in target.parent.glob(".writing-*"):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match["name"] != target.name:
            continue
        if not process_info.is_alive(int(match["pid"]), int(match["started"]) or None):
            shutil.rmtree(path, ignore_errors=True)


def _sync(root: Path) -> None:
    """Syncs every file and directory below `root` to disk."""
    for directory, _, names in os.walk(root):
        for name in names:
            with (Path(directory) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(directory))
