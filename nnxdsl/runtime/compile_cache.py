"""jax's persistent compilation cache, in the home of the runs: equal programs are compiled once.

See https://docs.jax.dev/en/latest/persistent_compilation_cache.html. A cache directory that the user has set in jax
takes precedence; `JAX_ENABLE_COMPILATION_CACHE=false` disables the cache.
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
    # Reading a program from the cache takes milliseconds; compiling even the smallest takes longer.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_CHECKED = "checked"
_ZSTD = b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def compile_cache(home: Path, warn: Callable[[str], object]) -> Iterator[None]:
    """Enables the cache under `home` within the block, unless the user has configured or disabled it.

    Args:
        home: The directory of all runs; not created before something is compiled.
        warn: Called with a message if the cache cannot be written; the block then runs without it.
    """
    if setting("jax_compilation_cache_dir") is not None or not setting("jax_enable_compilation_cache"):
        yield
        return
    place = home / DIRECTORY / "xla" / _machine()
    if problem := _problem(place):
        warn(f"compilation cache is off: {problem}")
        yield
        return
    _discard_incomplete(place)
    settings: dict[str, object] = {name: value for name, value in _SETTINGS.items() if name.upper() not in os.environ}
    settings["jax_compilation_cache_dir"] = str(place.absolute())
    before = {name: setting(name) for name in settings}
    _configure(settings)
    try:
        with warnings.catch_warnings():
            # A full disk is reported by metrics and checkpoints.
            warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
            yield
    finally:
        _configure(before)


def setting(name: str) -> object:
    """A setting of jax."""
    return getattr(jax.config, name)


def _configure(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # else jax keeps using the directory that it opened first


def _machine() -> str:
    """A name shared by machines of one CPU model: XLA:CPU compiles for all instructions of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    cpu = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))} or lines)
    return f"{platform.machine()}-{hashlib.sha256(chr(10).join(cpu).encode()).hexdigest()[:8]}"


def _problem(place: Path) -> str | None:
    """Why the directory cannot be written; None if it can."""
    existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is no directory"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"


def _discard_incomplete(place: Path) -> None:
    """Deletes incomplete entries of killed processes, which jax would fail to read at each start and never delete."""
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
                if not _is_complete(path.read_bytes()):
                    path.unlink()
        stamp.touch()
        os.utime(stamp, ns=(newest, newest))


def _is_complete(data: bytes) -> bool:
    """Whether a compressed entry is complete; True for zstandard entries if no library for them is installed."""
    try:
        if not data.startswith(_ZSTD):
            return len(zlib.decompress(data)) > 0
        for module in ("compression.zstd", "zstandard"):
            with contextlib.suppress(ImportError):
                return len(importlib.import_module(module).decompress(data)) > 0
    except Exception:  # each library raises its own types
        return False
    return True
