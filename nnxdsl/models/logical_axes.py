"""Where a layout may act on a model that is traced, by names of axes and paths of weights; models know no mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from flax import nnx

from nnxdsl.models.params import join

Axes = tuple[str | None, ...]
"""A logical name for each dimension, or None: "batch", "length", "activation_embed", "activation_heads",
"activation_kv_heads", "activation_mlp", "activation_vocab"."""

Constraint = Callable[[jax.Array, Axes], jax.Array]
WeightSharding = Callable[[str, jax.Array], jax.Array]
ShardMapCall = Callable[[Callable[..., jax.Array], tuple[jax.Array, ...], tuple[Axes, ...], Axes], jax.Array]

_current: ContextVar[Constraint | None] = ContextVar("constraint", default=None)
_weight_sharding: ContextVar[WeightSharding | None] = ContextVar("arrival", default=None)
_shard_map: ContextVar[ShardMapCall | None] = ContextVar("apart", default=None)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """The same values, where the layout wants them; `x` itself unless `sharding_hooks` is in force.

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


def is_constrained() -> bool:
    """Whether a constraint is in force: whether several devices may share an activation."""
    return _current.get() is not None


def shard_weights(state: nnx.State, prefix: str) -> nnx.State:
    """The weights of one period of a scan, where the layout wants them, as are their gradients.

    Args:
        state: the Variables of the period, without the axis of the scan.
        prefix: the path of the stack that they are a slice of.

    Returns:
        What the arrival in force makes of each; `state` itself unless `sharding_hooks` is in force.
    """
    arrival = _weight_sharding.get()
    if arrival is None:
        return state
    placed = [
        (path, variable.replace(arrival(join((prefix, *path)), variable.get_value())))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(placed)


def shard_map_call(
    function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], axes: tuple[Axes, ...], out: Axes
) -> jax.Array:
    """`function(*arrays)`, computed by each device for the part that it has, as kernels are that cannot be cut.

    Args:
        function: takes the arrays, or parts of them; what it gives for parts must be parts of what it gives for all.
        arrays: what it takes.
        axes: the logical name of each dimension of each array, None for one that has no name.
        out: the same of the result.

    Returns:
        The result; that of a plain call unless `sharding_hooks` is in force with a way to compute apart.
    """
    found = _shard_map.get()
    return function(*arrays) if found is None else found(function, arrays, axes, out)


@contextmanager
def sharding_hooks(
    constraint: Constraint | None,
    weight_sharding: WeightSharding | None = None,
    shard_map_call: ShardMapCall | None = None,
) -> Iterator[None]:
    """Within the context, `constrain` calls `constraint(x, axes)`, and `shard_weights` calls `arrival(path, weight)`.

    It is called while a model is traced, so it costs nothing when the compiled program runs. For the same reason a
    `jax.jit` function that was traced before, or within another context, keeps what it was traced with: enter the
    context inside the function that is jitted.

    Args:
        constraint: takes an activation and the name of each of its dimensions; returns it with the same shape and
            dtype. None for none.
        weight_sharding: takes the path of a stacked weight and one slice of it; returns the slice. None for none.
        shard_map_call: computes a function on each device's part of arrays, see `shard_map_call`. None for none.
    """
    tokens = _current.set(constraint), _weight_sharding.set(weight_sharding), _shard_map.set(shard_map_call)
    try:
        yield
    finally:
        _current.reset(tokens[0])
        _weight_sharding.reset(tokens[1])
        _shard_map.reset(tokens[2])
