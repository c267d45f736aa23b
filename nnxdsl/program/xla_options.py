"""XLA compiler options of programs that run a model, by platform, where the compiler has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from nnxdsl.runtime import xla_faults

OPTIONS = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", **xla_faults.options()}}
"""The CPU default schedules for concurrency, which takes up to a third more memory; but each operation already uses all
cores, and memory is allocated anew at every step."""


@cache
def options(platform: str) -> dict[str, str] | None:
    """The options of a platform; None for none, and where this XLA does not know them."""
    wanted = OPTIONS.get(platform)
    if wanted is None:
        return None
    try:
        jax.jit(lambda: 0, compiler_options=wanted).lower().compile()
    except jax.errors.JaxRuntimeError:
        return None
    return wanted


def jit(function: Callable[..., Any], platform: str | None = None, **settings: Any) -> Any:
    """`jax.jit` with the options of a platform. The result can be called within no other `jax.jit`.

    Args:
        function: A function that runs a model.
        platform: Of the devices; None for jax's default.
        settings: As of `jax.jit`.
    """
    return jax.jit(function, compiler_options=options(platform or jax.default_backend()), **settings)
