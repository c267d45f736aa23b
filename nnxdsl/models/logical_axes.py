"""Hooks through which a layout shards a traced model, by logical axes and paths of weights; models know no mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from flax import nnx

from nnxdsl.models.params import join

Axes = tuple[str | None, ...]
"""A logical name for each dimension, or None: "batch", "length", "activation_embed", "activation_heads",
"activation_kv_heads", "activation_mlp", "activation_vocab", "activation_per_layer"."""

Constraint = Callable[[jax.Array, Axes], jax.Array]
WeightSharding = Callable[[str, jax.Array], jax.Array]
ShardMapCall = Callable[[Callable[..., jax.Array], tuple[jax.Array, ...], tuple[Axes, ...], Axes], jax.Array]

_current: ContextVar[Constraint | None] = ContextVar("constraint", default=None)
_weight_sharding: ContextVar[WeightSharding | None] = ContextVar("weight_sharding", default=None)
_shard_map: ContextVar[ShardMapCall | None] = ContextVar("shard_map", default=None)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Applies the current sharding constraint; returns `x` itself outside of `sharding_hooks`.

    Args:
        x: an activation.
        axes: the logical name of each of its dimensions, or None.

    Raises:
        ValueError: more or fewer names than dimensions.
    """
    if len(axes) != x.ndim:
        raise ValueError(f"{len(axes)} logical axes {axes} for an activation of shape {x.shape}")
    constraint = _current.get()
    return x if constraint is None else constraint(x, axes)


def is_constrained() -> bool:
    """Whether there is a sharding constraint, so that several devices may share an activation."""
    return _current.get() is not None


def shard_weights(state: nnx.State, prefix: str) -> nnx.State:
    """Shards the weights of one period of a scan, and their gradients; returns `state` outside of `sharding_hooks`.

    Args:
        state: the Variables of the period, without the axis of the scan.
        prefix: the path of the stack that they are a slice of.
    """
    weight_sharding = _weight_sharding.get()
    if weight_sharding is None:
        return state
    placed = [
        (path, variable.replace(weight_sharding(join((prefix, *path)), variable.get_value())))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(placed)


def shard_map_call(
    function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], axes: tuple[Axes, ...], out: Axes
) -> jax.Array:
    """`function(*arrays)`, computed by each device on its own shards, for kernels that XLA cannot partition.

    Args:
        function: must give shards of the result for shards of the arrays.
        arrays: its arguments.
        axes: the logical name of each dimension of each array, or None.
        out: the logical names of the result's dimensions.

    Returns:
        The result; a plain call outside of `sharding_hooks`.
    """
    hooks = _shard_map.get()
    return function(*arrays) if hooks is None else hooks(function, arrays, axes, out)


def axis_size(mesh_axis: str) -> int:
    """Devices of a mesh axis, within a function of `shard_map_call`; 1 where that is a plain call."""
    try:
        return jax.lax.axis_size(mesh_axis)
    except NameError:
        return 1


@contextmanager
def sharding_hooks(
    constraint: Constraint | None,
    weight_sharding: WeightSharding | None = None,
    shard_map_call: ShardMapCall | None = None,
) -> Iterator[None]:
    """Within the context `constrain`, `shard_weights` and `shard_map_call` call these functions.

    They act while a model is traced. A `jax.jit` function that was traced in another context is not traced again:
    enter the context inside the jitted function.

    Args:
        constraint: takes an activation and its logical axes; returns it with the same shape and dtype.
        weight_sharding: takes the path of a stacked weight and one slice of it; returns the slice.
        shard_map_call: computes a function on each device's shards, see `shard_map_call`.
    """
    tokens = _current.set(constraint), _weight_sharding.set(weight_sharding), _shard_map.set(shard_map_call)
    try:
        yield
    finally:
        _current.reset(tokens[0])
        _weight_sharding.reset(tokens[1])
        _shard_map.reset(tokens[2])
