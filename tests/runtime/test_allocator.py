"""The allocator settings: freed memory is reused without the kernel if the machine has plenty."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = """
import ctypes, resource, sys, threading
from nnxdsl.runtime.allocator import keep_memory, use_one_arena
print(use_one_arena(), keep_memory(int(sys.argv[1])))
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.malloc.argtypes = [ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def work():
    for _ in range(5):
        block = c.malloc(100 * 2**20)
        c.memset(block, 1, 100 * 2**20)
        c.free(block)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
faults = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(faults[-1] - faults[0])
"""


def faults(needed: int, **environment: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, str(needed)],
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    said, count = done.stdout.splitlines()
    return said, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_a_block_is_taken_from_the_kernel_once() -> None:
    kept, small = faults(1)
    usual, many = faults(2**60)
    assert (kept, usual) == ("True True", "True False")
    assert small < 1_000 < many  # pages of 4 KiB, or of 2 MiB
    assert faults(1, MALLOC_TOP_PAD_="0")[0] == "False False"
