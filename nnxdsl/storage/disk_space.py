"""Checks before a write whether the disk has enough free space."""

from __future__ import annotations

import os
from pathlib import Path


def free_bytes(place: Path) -> int | None:
    """Free bytes for this user on the file system of `place`; None where it does not report them."""
    try:
        stats = os.statvfs(place)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else None


def shortage(place: Path, needed: int) -> str | None:
    """A message if `needed` bytes do not fit on the file system of `place`; None if they fit or it is unknown.

    Quotas are not checked: a write beyond one fails.
    """
    free = free_bytes(place)
    if free is None or needed <= free:
        return None
    return f"it needs {size(needed)} of disk space, and {size(free)} are free"


def size(count: int) -> str:
    """Formats bytes for people: "640 bytes", "3.2 GiB"."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
