"""Shows what jax traces and XLA compiles, whether it comes from the compilation cache, and how long it takes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax.monitoring

from nnxdsl.runtime.compile_cache import setting
from nnxdsl.terminal.display import Display
from nnxdsl.terminal.events import Phase

VERBS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
"""Events of jax, each of which has a begin and an end."""
CACHE_HIT = "/jax/compilation_cache/cache_hits"
STEP = "the training step"
NAMES = {
    "score": "log-probs",
    "evaluate": "the evaluation",
    "loss_metrics": "the metrics",
    "compute": "the reference's log-probs",
    "top_k": "the teacher's top k",
    "run": "generation",
    "initial_weights": "the drawing of initial weights",
}
"""Jitted functions by what people call them."""


@contextlib.contextmanager
def compile_progress(display: Display) -> Iterator[None]:
    """Within the block, each compilation of this thread is a phase of the display; that of a step always has a line."""
    thread, depth, phase, is_hit = threading.get_ident(), 0, None, False

    def begin(event: str, value: float, **kwargs: Any) -> None:
        nonlocal depth, phase, is_hit
        if event not in VERBS or threading.get_ident() != thread:
            return
        depth += 1
        if depth == 1:  # functions that are traced within another are part of it
            phase, is_hit = display.begin(f"{VERBS[event]} {_title(kwargs.get('fun_name', ''))}"), False

    def end(event: str, duration_secs: float, **kwargs: Any) -> None:
        nonlocal depth, phase
        if event not in VERBS or threading.get_ident() != thread or not depth:
            return
        depth -= 1
        if depth == 0 and phase is not None:
            if VERBS[event] == "compiling":
                _compiled(phase, is_hit)
            display.end(phase)
            phase = None

    def hit(event: str, **kwargs: Any) -> None:
        nonlocal is_hit
        is_hit = is_hit or event == CACHE_HIT

    jax.monitoring.register_scalar_listener(begin)
    jax.monitoring.register_event_duration_secs_listener(end)
    jax.monitoring.register_event_listener(hit)
    try:
        yield
    finally:
        jax.monitoring.unregister_scalar_listener(begin)
        jax.monitoring.unregister_event_duration_listener(end)
        jax.monitoring.unregister_event_listener(hit)


def _title(function: str) -> str:
    name = function.removeprefix("jit(").removesuffix(")")
    return STEP if name.endswith("_step") else NAMES.get(name, name)


def _compiled(phase: Phase, is_hit: bool) -> None:
    """Renames a phase that ends, by where the program came from."""
    what = phase.name.removeprefix("compiling ")
    phase.is_notable = what == STEP
    if is_hit:
        phase.name = f"reading {what} from the compilation cache"
    elif not (setting("jax_compilation_cache_dir") and setting("jax_enable_compilation_cache")):
        phase.name = f"compiling {what} (without a cache)"
    else:
        phase.name = f"compiling {what} (not in the cache)"
