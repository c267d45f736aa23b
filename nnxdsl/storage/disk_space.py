"""Whether a disk has room for what is about to be written, asked beforehand; knows bytes, not what they mean."""

from __future__ import annotations

import os
from pathlib import Path


def free_bytes(place: Path) -> int | None:
    """Bytes that this user may still write where `place` is; None where the file system does not say."""
    try:
        found = os.statvfs(place)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def shortage(place: Path, needed: int) -> str | None:
    """Why so many bytes will not fit where `place` is, in words; None if they will, or nobody knows.

    Quotas are not seen: a write beyond one fails when it comes to it.
    """
    free = free_bytes(place)
    if free is None or needed <= free:
        return None
    return f"it takes {size(needed)}, and {size(free)} are free"


def size(count: int) -> str:
    """Bytes in words: "640 bytes", "3.2 GiB"."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
