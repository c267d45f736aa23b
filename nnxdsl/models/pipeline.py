"""Pipeline parallelism: the stages of a stack of layers compute different rows at a time (GPipe, arXiv:1811.06965)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Stages(NamedTuple):
    """How a stack is divided.

    Attributes:
        number: number of stages; divides the length of the stack.
        parts: number of micro-batches that go through the stages; divides the number of rows.
        axis: the mesh axis of the stages.
    """

    number: int
    parts: int
    axis: str


def idle_share(stages: int, parts: int) -> float:
    """The pipeline bubble: the share of its time in which a stage has no rows."""
    return (stages - 1) / (parts + stages - 1)


def run_stages(
    run: Callable[[Any, jax.Array, Any], jax.Array], weights: Any, x: jax.Array, context: Any, stages: Stages
) -> jax.Array:
    """`run(weights, x, context)` of the whole stack, computed stage by stage.

    At tick t stage s computes micro-batch t - s, if there is one, from the output of the stage before it at tick t - 1.
    All stages are one vmapped call, so the layout can give each its own devices.

    Args:
        run: runs a stack of any length.
        weights: of the whole stack, each array `[L, ...]`.
        x: `[B, T, D]`.
        context: arrays with an entry for each row, `[B, ...]`.
        stages: how the stack is divided.

    Returns:
        `[B, T, D]`.
    """
    count, parts = stages.number, stages.parts
    cut = jax.tree.map(lambda weight: weight.reshape(count, -1, *weight.shape[1:]), weights)  # [S, L / S, ...]

    def split(rows: jax.Array) -> jax.Array:  # [parts, B / parts, ...], without moving rows between devices
        # The length is given: tables of layers without rotary positions are empty.
        return jnp.moveaxis(rows.reshape(len(rows) // parts, parts, *rows.shape[1:]), 1, 0)

    def part_of(number: jax.Array, rows: Any) -> Any:
        index = jnp.clip(number, 0, parts - 1)
        return jax.tree.map(lambda all_parts: jax.lax.dynamic_index_in_dim(all_parts, index, keepdims=False), rows)

    entering, contexts = split(x), jax.tree.map(split, context)

    def tick(before: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = jnp.concatenate([part_of(time, entering)[None], before[:-1]])  # [S, b, T, D]
        stage_contexts = jax.vmap(lambda stage: part_of(time - stage, contexts))(jnp.arange(count))
        after = jax.vmap(run, spmd_axis_name=stages.axis)(cut, inputs, stage_contexts)
        return after, after[-1]

    nothing = jnp.zeros((count, *entering.shape[1:]), x.dtype)
    _, leaving = jax.lax.scan(tick, nothing, jnp.arange(parts + count - 1))
    done = leaving[count - 1 :]  # [parts, B / parts, T, D]
    return jnp.moveaxis(done, 0, 1).reshape(x.shape)
