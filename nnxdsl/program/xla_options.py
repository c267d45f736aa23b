"""XLA compiler options of a step by platform, where the compiler has them."""

from __future__ import annotations

from functools import cache

import jax

OPTIONS = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}}
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
