"""What holds for all tests: laws are tried on the same examples, and nothing is compiled twice.

Laws: `HYPOTHESIS_PROFILE=default pytest ...` asks for other examples. What XLA compiles is kept for the time of the
tests and shared by their processes, most of whose time is compiling; `JAX_COMPILATION_CACHE_DIR=DIR pytest ...` keeps
it longer. XLA compiles quickly rather than well, since the programs run for a moment: LLVM does not optimize, and fused
operations go through the older of its two code generators, which takes half the time. `XLA_FLAGS= pytest ...` compiles
as a user's run does; so do the recorded results of tests/regression.

Memory is kept as in a run (`nnxdsl.runtime.allocator`), and the garbage collector looks rarely at what stays anyway:
both together take a sixth off the processor's time.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import shutil
import tempfile

import pytest
from hypothesis import settings

from nnxdsl.runtime import allocator

settings.register_profile("same examples", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same examples"))

CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


JAXLIB = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
QUICKLY = "--xla_backend_optimization_level=0"
if JAXLIB < (0, 11):  # later ones have no other fusions on CPUs, and end the process at a flag that they do not know
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"


def pytest_configure(config: pytest.Config) -> None:
    """Tells jax, which no test has imported yet, and all processes that are started from here."""
    os.environ.setdefault("XLA_FLAGS", QUICKLY)
    if allocator.one_arena():
        allocator.keep_memory(0)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # a worker has what its controller was told
        return
    place = tempfile.mkdtemp(prefix="nnxdsl-compiled-")
    os.environ.update(CACHE, JAX_COMPILATION_CACHE_DIR=place)
    config.add_cleanup(lambda: shutil.rmtree(place, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Keeps thousands of collected tests, and modules, out of each collection of garbage."""
    gc.set_threshold(10_000, 20, 20)
    gc.collect()
    gc.freeze()
