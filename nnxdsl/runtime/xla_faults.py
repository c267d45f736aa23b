"""XLA options that work around crashes of released versions of XLA.

An option reaches XLA in two ways, and each fault is avoided in both. `XLA_FLAGS` is set when nnxdsl is imported, so in
child processes as well: it holds for all that they compile, a user's own `jax.jit` too, but XLA reads it once, when jax
first looks for devices. `nnxdsl.program.xla_options` passes the same options with each program that runs a model, for
processes in which jax was initialized before nnxdsl was imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from nnxdsl.storage.process_info import installed_versions

FAULTS: Mapping[str, tuple[frozenset[str], str]] = {
    # A fused transpose or product of more dimensions than YNNPACK has room for is a segmentation fault, or never ends:
    # the chunked delta rule is one (https://github.com/jax-ml/jax/issues/39257). 0.10.1 does not fuse these operations,
    # 0.11.1 is built with the fixed library; that is also why the fusion is not turned off for all versions.
    "xla_cpu_experimental_ynn_fusion_type": (frozenset({"0.10.2", "0.11.0"}), ""),
}
"""Option -> versions of jaxlib that have the fault, and the value that avoids it. Another version may not know the
option, and XLA ends the process at a flag that it does not know."""


def options(version: str | None = None) -> dict[str, str]:
    """The options that a version of jaxlib needs.

    Args:
        version: The version; None for the installed one.
    """
    version = version or installed_versions(["jaxlib"]).get("jaxlib", "")
    return {name: value for name, (versions, value) in FAULTS.items() if version in versions}


def set_flags(environment: MutableMapping[str, str] = os.environ, version: str | None = None) -> None:
    """Adds the options to `XLA_FLAGS`, except for those that the user has set."""
    flags = environment.get("XLA_FLAGS", "").split()
    taken = {flag.partition("=")[0] for flag in flags}
    added = [f"--{name}={value}" for name, value in options(version).items() if f"--{name}" not in taken]
    if added:
        environment["XLA_FLAGS"] = " ".join([*flags, *added])
