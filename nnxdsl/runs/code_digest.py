"""A digest of the code and the versions of its dependencies: part of the key of every cached result.

It covers every Python file of nnxdsl except the web app, and every package that computes or compiles. A key that left
files out could return a stale result; recomputing one after a change of a help text costs little.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from nnxdsl.storage.process_info import installed_versions

PACKAGES = (
    "nnxdsl", "jax", "jaxlib", "flax", "optax", "qwix", "numpy", "ml-dtypes", "safetensors",
    "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu",
)  # fmt: skip
"""Packages whose version may change a result."""

_PACKAGE = Path(__file__).parents[1]
_APP = "_app"  # the app's directory in an installed package


@cache
def code_digest(package: Path = _PACKAGE) -> str:
    """SHA-256 over the names and bytes of all Python files below a directory; by default nnxdsl's own."""
    hashed = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] != _APP:
            data = path.read_bytes()
            hashed.update(f"{name.as_posix()} {len(data)}\n".encode() + data)
    return hashed.hexdigest()


@cache
def code_versions() -> dict[str, str]:
    """The versions of those `PACKAGES` that are installed, by name."""
    return installed_versions(PACKAGES)
