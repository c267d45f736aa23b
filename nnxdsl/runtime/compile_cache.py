"""What XLA compiled, kept beside the runs: a process that does what another one did does not compile it again.

It is jax's persistent cache (https://docs.jax.dev/en/latest/persistent_compilation_cache.html) with a place of its own.
Whoever has told jax of another place has that one; `JAX_ENABLE_COMPILATION_CACHE=false` does without any.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import platform
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from nnxdsl.runtime.xla_flags import DIRECTORY

_SETTINGS = {
    # Reading a program takes milliseconds, whatever its size; even the smallest takes longer to compile.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_CHECKED = "checked"
_ZSTD = b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def compile_cache(home: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Has jax keep and find programs under `home` within the block, if the user has not decided otherwise.

    Args:
        home: Of all runs; it is not made before something is compiled.
        tell: Called with why programs cannot be kept, if so; nothing else comes of it.
    """
    if _setting("jax_compilation_cache_dir") is not None or not _setting("jax_enable_compilation_cache"):
        yield
        return
    place = home / DIRECTORY / "xla" / _machine()
    if problem := _problem(place):
        tell(f"what XLA compiles cannot be kept: {problem}")
        yield
        return
    _discard_torn(place)
    wanted: dict[str, object] = {name: value for name, value in _SETTINGS.items() if name.upper() not in os.environ}
    wanted["jax_compilation_cache_dir"] = str(place.absolute())
    before = {name: _setting(name) for name in wanted}
    _configure(wanted)
    try:
        with warnings.catch_warnings():
            # A disk that is full by now: it shows where it matters.
            warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
            yield
    finally:
        _configure(before)


def _setting(name: str) -> object:
    return getattr(jax.config, name)


def _configure(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # jax opens it once, where it was told first


def _machine() -> str:
    """A name for machines that run each other's programs: those of a CPU use all instructions that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))} or lines)
    return f"{platform.machine()}-{hashlib.sha256(chr(10).join(told).encode()).hexdigest()[:8]}"


def _problem(place: Path) -> str | None:
    """Why nothing can be written there; None if it can."""
    there = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is no directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def _discard_torn(place: Path) -> None:
    """Deletes what a process wrote half when it was killed; jax would find it damaged at each start, and keep it."""
    with contextlib.suppress(OSError):
        stamp = place / _CHECKED
        since = stamp.stat().st_mtime_ns if stamp.exists() else 0
        if not place.is_dir():
            return
        newest = since
        for path in place.glob("*-cache"):
            written = path.stat().st_mtime_ns
            if written >= since:
                newest = max(newest, written)
                if not _is_whole(path.read_bytes()):
                    path.unlink()
        stamp.touch()
        os.utime(stamp, ns=(newest, newest))


def _is_whole(data: bytes) -> bool:
    """Whether a compressed entry has its end. Python's own zlib says so; of zstandard, where it is installed."""
    try:
        if not data.startswith(_ZSTD):
            return len(zlib.decompress(data)) > 0
        for module in ("compression.zstd", "zstandard"):
            with contextlib.suppress(ImportError):
                return len(importlib.import_module(module).decompress(data)) > 0
    except Exception:  # each library has errors of its own
        return False
    return True
