"""Products of rows with the matrix of the group that each is in; knows no router, and of devices only what is cut.

`jax.lax.ragged_dot` is that product. XLA has no such thing for CPUs: there it becomes a product of every row with every
matrix, of which most is masked away. So CPUs get a loop over blocks of rows of one group, which multiplies little more
than there is. By `python benchmarks/grouped_matmul.py --calls 15` (two cores that had other work besides, jax 0.10.2),
2,048 rows and 8 matrices of 256 x 512 take 15 ms instead of 48, and with their gradients 30 instead of 233; 8,192 rows
and 64 matrices of 256 x 128 take 12 instead of 518, and 70 instead of 2,007. All tokens with all matrices, without
sorting, take longer than the loop at every size that was tried (40 and 235; 77 and 309). GPUs and TPUs would idle in
the loop and get `ragged_dot`, which XLA computes there in its own way; how fast that is, was not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nnxdsl.models.logical_axes import shard_map_call

BLOCK = 64
"""Rows of one block of the loop for CPUs. Between 32 and 128 it does not matter much."""

SLOTS = ("batch", "length", None)
"""The logical axes of an array with an entry for each slot: k slots for each token of each row."""

_CONTRACTING = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def grouped_dot(x: jax.Array, kernel: jax.Array, group: jax.Array, axis: str | None = None) -> jax.Array:
    """Each slot's vector times the matrix of the slot's group.

    Each device computes its own slots with all matrices, of which only the last axis stays sharded, as `axis` is.

    Args:
        x: `[B, T, k, in]`; slots are sorted by group (over all axes but the last, on each device by itself).
        kernel: `[G, in, out]` in the dtype of `x`.
        group: `[B, T, k]` int32, ascending; G for masked slots.
        axis: the logical name of the result's last axis.

    Returns:
        `[B, T, k, out]`; zero for masked slots.
    """

    def local(x: jax.Array, kernel: jax.Array, group: jax.Array) -> jax.Array:
        groups, flat = len(kernel), group.reshape(-1)
        numbers = jnp.arange(groups, dtype=flat.dtype)
        ends = jnp.searchsorted(flat, numbers, side="right", method="scan_unrolled").astype(jnp.int32)
        product = _rows_by_group(x.reshape(-1, x.shape[-1]), kernel, jnp.diff(ends, prepend=0))
        # Masked slots have no effect, forward or backward.
        product = jnp.where((flat < groups)[:, None], product, 0)
        return product.reshape(*x.shape[:-1], -1)

    axes = ((*SLOTS, None), (None, None, axis), SLOTS)
    return shard_map_call(local, (x, kernel, group), axes, (*SLOTS, axis))


@jax.custom_vjp
def _rows_by_group(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """`[R, in]`, `[G, in, out]` and the groups' numbers of rows `[G]` to `[R, out]`, undefined after the last group."""
    return _product(x, kernel, sizes)


def _forward(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(x, kernel, sizes), (x, kernel, sizes)


def _backward(residuals: tuple[jax.Array, ...], change: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernel, sizes = residuals
    is_in_group = jnp.arange(len(x)) < jnp.sum(sizes)
    to_x = jnp.where(is_in_group[:, None], _product(change, jnp.swapaxes(kernel, 1, 2), sizes), 0)
    return to_x, _outer(x, change, sizes).astype(kernel.dtype), None


_rows_by_group.defvjp(_forward, _backward)


def _many_groups(function: Callable[..., jax.Array], *, grouped_result: bool) -> Callable[..., jax.Array]:
    """Gives `function(x, other, sizes)` a batching rule: a batch is one call with more rows and more groups.

    The stages of a pipeline are such a batch; `ragged_dot` itself has no batching rule.
    """
    called = jax.custom_batching.custom_vmap(function)

    @called.def_vmap
    def many(axis_size: int, batched: list[bool], x: Any, other: Any, sizes: Any) -> tuple[jax.Array, bool]:
        arrays = (
            array if has else jnp.broadcast_to(array, (axis_size, *array.shape))
            for array, has in zip((x, other, sizes), batched, strict=True)
        )
        x, other, sizes = arrays  # [N, R, in], [N, G, in, out] or [N, R, out], [N, G]
        left = x.shape[1] - jnp.sum(sizes, axis=1)
        sizes = sizes.at[:, -1].add(left)  # the groups of consecutive batch entries must be adjacent
        result = called(*(array.reshape(-1, *array.shape[2:]) for array in (x, other, sizes)))
        inner = sizes.shape[1] if grouped_result else x.shape[1]
        return result.reshape(axis_size, inner, *result.shape[1:]), True

    return called


@partial(_many_groups, grouped_result=False)
def _product(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """As `_rows_by_group`, without a gradient."""
    return jax.lax.platform_dependent(x, kernel, sizes, cpu=_product_in_blocks, default=jax.lax.ragged_dot)


@partial(_many_groups, grouped_result=True)
def _outer(x: jax.Array, change: jax.Array, sizes: jax.Array) -> jax.Array:
    """`[R, in]` and `[R, out]` to `[G, in, out]`: the sum over each group's rows of their outer products."""

    def ragged(x: jax.Array, change: jax.Array, sizes: jax.Array) -> jax.Array:
        product = partial(jax.lax.ragged_dot_general, preferred_element_type=jnp.float32)
        return product(x, change, sizes, _CONTRACTING)

    return jax.lax.platform_dependent(x, change, sizes, cpu=_outer_in_blocks, default=ragged)


def _product_in_blocks(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    rows, block = len(x), min(BLOCK, len(x))
    x = jnp.pad(x, ((0, block), (0, 0)))

    # A block also computes rows of later groups, whose own blocks overwrite them afterwards.
    def step(out: jax.Array, group: jax.Array, start: jax.Array, _: jax.Array) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(kernel, group, keepdims=False)
        product = jax.lax.dot(jax.lax.dynamic_slice_in_dim(x, start, block), matrix)
        return jax.lax.dynamic_update_slice_in_dim(out, product, start, axis=0)

    return _for_blocks(sizes, block, step, jnp.zeros((rows + block, kernel.shape[-1]), x.dtype))[:rows]


def _outer_in_blocks(x: jax.Array, change: jax.Array, sizes: jax.Array) -> jax.Array:
    block = min(BLOCK, len(x))
    x, change = (jnp.pad(array, ((0, block), (0, 0))) for array in (x, change))

    def step(out: jax.Array, group: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        is_in_group = (start + jnp.arange(block) < end)[:, None]
        one, other = (
            jnp.where(is_in_group, jax.lax.dynamic_slice_in_dim(rows, start, block), 0) for rows in (x, change)
        )
        product = jax.lax.dot_general(one, other, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        so_far = jax.lax.dynamic_index_in_dim(out, group)
        return jax.lax.dynamic_update_slice_in_dim(out, so_far + product[None], group, axis=0)

    return _for_blocks(sizes, block, step, jnp.zeros((len(sizes), x.shape[1], change.shape[1]), jnp.float32))


def _for_blocks(
    sizes: jax.Array,
    block: int,
    step: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
    first: jax.Array,
) -> jax.Array:
    """Calls `step(out, group, first row, end of the group)` for every block of every group that has rows, in order."""
    ends = jnp.cumsum(sizes)
    blocks = -(-sizes // block)
    after = jnp.cumsum(blocks)

    def one(number: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.sum(after <= number, dtype=jnp.int32)
        within = number - (after[group] - blocks[group])
        return step(out, group, ends[group] - sizes[group] + within * block, ends[group])

    return jax.lax.fori_loop(0, after[-1], one, first)
