"""What code computes: part of the name of every result that is kept for later; imports none of what it names.

The rule: every Python file of nnxdsl, and the version of every package that computes or compiles. A process that
computes may import any of those files, so a name that left some out would answer for code that has changed; that a
change of a help text asks for a result again costs little. The web app alone is left out, which never computes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import cache
from pathlib import Path

PACKAGES = (
    "nnxdsl", "jax", "jaxlib", "flax", "optax", "qwix", "numpy", "ml-dtypes", "safetensors",
    "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu",
)  # fmt: skip
"""Those that compute, where they are installed."""

_PACKAGE = Path(__file__).parents[1]
_APP = "_app"  # where the app's files are in an installed package


@cache
def code_digest(package: Path = _PACKAGE) -> str:
    """SHA-256 over the names and bytes of all Python files below a directory, nnxdsl's own if none is given."""
    hashed = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] != _APP:
            data = path.read_bytes()
            hashed.update(f"{name.as_posix()} {len(data)}\n".encode() + data)
    return hashed.hexdigest()


@cache
def code_versions() -> dict[str, str]:
    """The versions of `PACKAGES`, by name."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
