"""XLA compiler options of programs that run a model, by platform, where the compiler has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from nnxdsl.runtime import xla_faults

OPTIONS = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", **xla_faults.options()}}
"""For CPUs it would order operations so that more of them can run beside each other, which keeps up to a third more
memory; but each one has all cores already, and memory is given out anew at every step."""


@cache
def options(platform: str) -> dict[str, str] | None:
    """The options of a platform; None for none, and where this XLA has no such option, which would be an error."""
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
