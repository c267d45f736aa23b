"""Paths without pattern characters, for libraries that read them in the path of a directory.

Orbax finds the parts of a checkpoint by a glob over the whole path, and tensorstore takes backslashes for slashes.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

from nnxdsl.errors import RunError

_PATTERN = re.compile(r"[*?\[\]\\]")
_lock = threading.Lock()
_links: dict[Path, Path] = {}


def plain_path(directory: Path) -> Path:
    """The absolute path of a directory, or of a link to it in the temporary directory where the path is not plain.

    A link lasts until the process ends.

    Raises:
        RunError: The path of the temporary directory is not plain either.
        OSError: The link cannot be made.
    """
    directory = directory.absolute()
    if _is_plain(directory):
        return directory
    with _lock:
        link = _links.get(directory)
        if link is None or not link.is_symlink():
            link = _links[directory] = _make_link(directory)
        return link


def _is_plain(path: Path) -> bool:
    try:
        path.as_posix().encode()
    except UnicodeEncodeError:  # a name that is not UTF-8
        return False
    return _PATTERN.search(str(path)) is None


def _make_link(directory: Path) -> Path:
    if not _is_plain(Path(tempfile.gettempdir()).absolute()):
        raise RunError(
            f"the path has *, ?, [, ] or a backslash, and so has that of the temporary directory, "
            f"{tempfile.gettempdir()}; set TMPDIR to another one, or name another directory"
        )
    place = tempfile.mkdtemp(prefix="nnxdsl-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    link = Path(place).absolute() / "directory"
    os.symlink(directory, link, target_is_directory=True)
    return link
