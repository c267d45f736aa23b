"""Names for the axes of activations, and the one place where a layout may act on them; models never know the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

Axes = tuple[str | None, ...]
"""A logical name for each dimension, or None: "batch", "length", "activation_embed", "activation_heads",
"activation_kv_heads", "activation_mlp", "activation_vocab"."""

Constraint = Callable[[jax.Array, Axes], jax.Array]

_current: ContextVar[Constraint | None] = ContextVar("constraint", default=None)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """The same values, where the layout wants them; `x` itself unless `constrained_by` is in force.

    Args:
        x: an activation.
        axes: the logical name of each of its dimensions, None for one that has no name.

    Returns:
        What the constraint in force makes of `x`.

    Raises:
        ValueError: more or fewer names than dimensions.
    """
    if len(axes) != x.ndim:
        raise ValueError(f"{len(axes)} names of axes {axes} for an activation of shape {x.shape}")
    constraint = _current.get()
    return x if constraint is None else constraint(x, axes)


@contextmanager
def constrained_by(constraint: Constraint | None) -> Iterator[None]:
    """Within the context, `constrain` calls `constraint(x, axes)`.

    It is called while a model is traced, so it costs nothing when the compiled program runs. For the same reason a
    `jax.jit` function that was traced before, or within another context, keeps what it was traced with: enter the
    context inside the function that is jitted.

    Args:
        constraint: takes an activation and the name of each of its dimensions; returns it with the same shape and
            dtype. None for none.
    """
    token = _current.set(constraint)
    try:
        yield
    finally:
        _current.reset(token)
