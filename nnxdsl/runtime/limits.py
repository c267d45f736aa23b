"""What the system lets a process have: descriptors, address space; and whether an error means that it ran out.

Imports no jax: an address space that is too small for jax is to be told before it is loaded.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from nnxdsl.errors import RunError
from nnxdsl.storage.disk_space import size

ADDRESS_SPACE = 2 * 2**30
"""The least for jax and a small model: the smallest run takes 1.2 GiB, and libraries abort where they get no more."""

DESCRIPTORS = 64
"""Free file descriptors that a save may take."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CURES = {
    resource.RLIMIT_AS: "raise the limit of address space (ulimit -v)",
    resource.RLIMIT_DATA: "raise the limit of data segments (ulimit -d)",
}


def require_address_space() -> None:
    """Refuses to load jax where it has no room for its libraries and their threads: it would abort, or worse.

    Raises:
        RunError: How much there may be, and how much it takes.
    """
    for limit, cure in _CURES.items():
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < ADDRESS_SPACE:
            raise RunError(
                f"this process may have {size(soft)} of memory, and a computation takes at least "
                f"{size(ADDRESS_SPACE)}; {cure} and run again"
            )


def descriptor_shortage(needed: int = DESCRIPTORS) -> str | None:
    """Why so many files cannot be opened, in words; None if they can, or nobody knows.

    The limit is raised, as far as this process may, before it counts as too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _open_descriptors()
    if soft == resource.RLIM_INFINITY or used is None or soft - used >= needed:
        return None
    if hard == resource.RLIM_INFINITY or hard - used >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + needed, hard))
        return None
    free = max(0, soft - used)
    return f"it takes {needed} file descriptors, and {free} of {soft} are free; raise the limit (ulimit -n)"


def _open_descriptors() -> int | None:
    """How many there are; all that there may be where not even a directory can be opened; None where nobody knows."""
    if not Path("/proc/self/fd").is_dir():
        return None
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # one is that of the listing
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def exhausted(error: BaseException) -> str | None:
    """What ran out, where an error or one that led to it means that the system gave no more; None for other errors."""
    for one in _causes(error):
        text = (str(one).strip().splitlines() or [""])[0][:300]
        name = type(one).__name__
        if isinstance(one, OSError) and (one is error or one.errno in _EXHAUSTED):
            return f"{name}: {text}"
        if isinstance(one, MemoryError):
            return f"MemoryError: {text or 'out of memory'}; give it more memory, or a smaller model or batch"
        if isinstance(one, RuntimeError) and ("start new thread" in text or "RESOURCE_EXHAUSTED" in text):
            return f"{name}: {text}; give it more memory or threads (ulimit -v, ulimit -u), or a smaller model or batch"
        if isinstance(one, ImportError | SystemError) and _is_limited():
            return f"{name}: {text}; this process may have too little memory: {_CURES[resource.RLIMIT_AS]}"
    return None


def _is_limited() -> bool:
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _CURES)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
