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
import platform
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

JAXLIB = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
QUICKLY = "--xla_backend_optimization_level=0"
if JAXLIB < (0, 11):  # later ones have no other fusions on CPUs, and end the process at a flag that they do not know
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", QUICKLY)  # before nnxdsl is imported, which adds to what it finds

from nnxdsl.runtime import allocator  # noqa: E402
from tests.bounds import Bounds  # noqa: E402

settings.register_profile("same examples", derandomize=True, database=None, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same examples"))

CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


LONGEST = ("test_bad_input", "test_user_flags")
"""Files with the longest single tests; the first trains the recipes that all tests of runs share."""


ON_GPU = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # float32 is to be float32: jax multiplies it in TF32 by default
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # one device is shared by all workers
}
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bounds", metavar="FILE", help="write how much of its bound each comparison used")
    parser.addoption("--max-isa", metavar="ISA", help="compile for a lesser x86 processor: SSE4_2, AVX, AVX2 or AVX512")


def pytest_configure(config: pytest.Config) -> None:
    """Tells jax, which no test has imported yet, and all processes that are started from here."""
    if config.getoption("bounds"):
        bounds = Bounds()
        bounds.watch()
        config.pluginmanager.register(bounds)
    if not hasattr(config, "workerinput"):  # a worker has what its controller was told
        if config.getoption("markexpr") == "gpu":
            os.environ.update(ON_GPU, XLA_FLAGS=f"{os.environ['XLA_FLAGS'].replace(QUICKLY, '')} {DETERMINISTIC}")
        if isa := config.getoption("max_isa"):
            os.environ["XLA_FLAGS"] += f" --xla_cpu_max_isa={isa}"
    if allocator.use_one_arena():
        allocator.keep_memory(0)
    os.environ.update({name: value for name, value in CACHE.items() if name not in os.environ})
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # set by the user, or by the controller
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = place = tempfile.mkdtemp(prefix="nnxdsl-compiled-")
    config.add_cleanup(lambda: shutil.rmtree(place, ignore_errors=True))


def pytest_report_header() -> str:
    return "nnxdsl: the tests take eight to twelve minutes on two cores; the percentage says how far they are"


def machine() -> str:
    """What a failure may depend on: the processor, its cores, versions, and the compiler's flags."""
    cpu = Path("/proc/cpuinfo")
    lines = dict(line.split(":", 1) for line in cpu.read_text().splitlines() if ":" in line) if cpu.exists() else {}
    values = {key.strip(): value.strip() for key, value in lines.items()}
    sets = [name for name in ("sse4_2", "avx", "f16c", "avx2", "avx512f") if name in values.get("flags", "").split()]
    affinity = getattr(os, "sched_getaffinity", None)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "numpy", "pytest")]
    return "\n".join(
        (
            f"{platform.platform()}, {values.get('model name', platform.processor())}, {' '.join(sets)}",
            f"{os.cpu_count()} cores" + (f", of which {len(affinity(0))} may be used" if affinity else ""),
            f"Python {platform.python_version()}, {', '.join(versions)}",
            f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}",
        )
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says what the failed tests ran on."""
    if terminalreporter.getreports("failed") or terminalreporter.getreports("error"):
        terminalreporter.section("machine, versions and flags of these failures")
        terminalreporter.write_line(machine())


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, so that no process ends alone with one, and sorts out variants.

    Of a test with `default_variants(N)` the first N are in the default suite, the others in the extended.
    """
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("default_variants"):
            function = item.nodeid.split("[")[0]
            if seen[function] >= mark.args[0]:
                item.add_marker("extended")
            seen[function] += item.get_closest_marker("slow") is None


def pytest_collection_finish() -> None:
    """Keeps thousands of collected tests, and modules, out of each collection of garbage."""
    gc.set_threshold(10_000, 20, 20)
    gc.collect()
    gc.freeze()
