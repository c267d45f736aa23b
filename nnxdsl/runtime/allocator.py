"""Settings of glibc's malloc for XLA:CPU, which allocates all temporaries of a step at once and frees them after it.

By default glibc maps a block of more than 32 MiB anew each time and unmaps it when it is freed, so that the kernel
zeroes all its pages in each step: a quarter to a third of the CPU time for a small model. Keeping the memory costs
fragmentation: other blocks are allocated in freed space, until there are three or four blocks of that size.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Mapping

SPARE = 4
"""Freed memory is kept if the machine has this many times the peak memory of the process."""

# From glibc's malloc.h; see mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def use_one_arena(environment: Mapping[str, str] = os.environ) -> bool:
    """Makes all later threads share one heap; a heap per thread is limited to 64 MiB, which is too little.

    Returns:
        Whether it was set: False without glibc, or if the user has set malloc's environment variables.
    """
    return _set({_ARENA_MAX: 1}, environment)


def keep_memory(used: int | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Makes this process keep freed memory, if the machine has plenty; call `use_one_arena` first.

    Args:
        used: Peak memory in bytes; None for the kernel's value, which is accurate after a step.
        environment: Environment variables, which may hold the user's own settings of malloc.
    """
    if used is None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if SPARE * used > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return False
    # Never mmap a large block, never trim the heap's end, and grow the heap by 64 MiB at a time.
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 * 2**20}, environment)


def _set(options: Mapping[int, int], environment: Mapping[str, str]) -> bool:
    is_set_by_user = "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment)
    if is_set_by_user or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(name, value) == 1 for name, value in options.items())
