"""How the C library keeps memory for XLA:CPU, which asks for all temporaries of a step at once and gives them back.

By default glibc takes a block of more than 32 MiB from the kernel each time and returns it. The kernel then zeroes
every page of it anew in each step: a quarter to a third of the processor's time where the model is small. To keep it
takes memory: other blocks come to lie in the gap, and until all have found a place there are three or four such gaps.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Mapping

SPARE = 4
"""Memory is kept where the machine has so many times what the process has used at most."""

# Of glibc's malloc.h; mallopt(3) describes them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def one_arena(environment: Mapping[str, str] = os.environ) -> bool:
    """Has threads that are begun from now on share one heap: those of their own end at 64 MiB, which is too little.

    Returns:
        Whether that was done: not without glibc, nor where the user has set any of its own variables.
    """
    return _set({_ARENA_MAX: 1}, environment)


def keep_memory(used: int | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Has this process keep what it has from the kernel, if there is plenty; see `one_arena`, which comes before.

    Args:
        used: Bytes that it has used at most; None for what the kernel says, which is right after a step.
        environment: Where the user may have decided otherwise.
    """
    if used is None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if SPARE * used > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return False
    # Nothing is mapped apart, however large; what is free at the heap's end stays; it grows by 64 MiB at a time.
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 * 2**20}, environment)


def _set(options: Mapping[int, int], environment: Mapping[str, str]) -> bool:
    is_decided = "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment)
    if is_decided or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(name, value) == 1 for name, value in options.items())
