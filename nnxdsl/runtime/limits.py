"""Resource limits of the process: file descriptors and address space; and errors that mean that one was exceeded.

Imports no jax, so that an address space that is too small for jax is reported before jax is loaded.
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
"""Minimum for jax and a small model: the smallest run takes 1.2 GiB, and libraries abort if they get less."""

DESCRIPTORS = 64
"""Free file descriptors that a save may need."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    resource.RLIMIT_AS: "raise the limit of address space (ulimit -v)",
    resource.RLIMIT_DATA: "raise the limit of data segments (ulimit -d)",
}


def require_address_space() -> None:
    """Refuses to start if the limit of address space is too small for jax, which would abort.

    Raises:
        RunError: With the limit and the minimum.
    """
    for limit, remedy in _REMEDIES.items():
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < ADDRESS_SPACE:
            raise RunError(
                f"the memory of this process is limited to {size(soft)}, and jax needs at least "
                f"{size(ADDRESS_SPACE)}; {remedy} and run again"
            )


def descriptor_shortage(needed: int = DESCRIPTORS) -> str | None:
    """A message if `needed` more files cannot be opened; None if they can, or it is unknown.

    Raises the soft limit first, up to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _open_descriptors()
    if soft == resource.RLIM_INFINITY or used is None or soft - used >= needed:
        return None
    if hard == resource.RLIM_INFINITY or hard - used >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + needed, hard))
        return None
    free = max(0, soft - used)
    return f"it needs {needed} file descriptors, and {free} of {soft} are free; raise the limit (ulimit -n)"


def _open_descriptors() -> int | None:
    """Number of open descriptors: the limit if the directory cannot be opened; None without /proc."""
    if not Path("/proc/self/fd").is_dir():
        return None
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without that of the listing
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def exhausted(error: BaseException) -> str | None:
    """A message if an error, or one of its causes, means that a resource was exhausted; None for other errors."""
    for cause in _causes(error):
        text = (str(cause).strip().splitlines() or [""])[0][:300]
        name = type(cause).__name__
        if isinstance(cause, OSError) and (cause is error or cause.errno in _EXHAUSTED):
            return f"{name}: {text}"
        if isinstance(cause, MemoryError):
            return f"MemoryError: {text or 'out of memory'}; give it more memory, or a smaller model or batch"
        if isinstance(cause, RuntimeError) and ("start new thread" in text or "RESOURCE_EXHAUSTED" in text):
            return f"{name}: {text}; give it more memory or threads (ulimit -v, ulimit -u), or a smaller model or batch"
        if isinstance(cause, ImportError | SystemError) and _is_limited():
            return f"{name}: {text}; this process may have too little memory: {_REMEDIES[resource.RLIMIT_AS]}"
    return None


def _is_limited() -> bool:
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _REMEDIES)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
