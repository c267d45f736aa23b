"""Rows of tokens through a short convolution and a recurrence: packed, padded, with branches, or from a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.row_layout import RowLayout


class RecurrentState(NamedTuple):
    """The recurrent state of a layer, of constant size; any leading axes, then those below.

    Attributes:
        conv_state: `[B, channels, conv_kernel - 1]`, the convolution's inputs at the last tokens; zeros at first.
        memory: `[B, heads, key width, value width]` float32.
    """

    conv_state: jax.Array
    memory: jax.Array


class Inputs(NamedTuple):
    """The inputs of a recurrence, of slots `[B, T]`; K groups of heads.

    Attributes:
        mixed: `[B, T, K, W]`, what the convolution reads.
        rates: `[B, T, K, ...]`, what it does not.
        segment: `[B, T]`; 0 is padding.
        branch: `[B, T]`; None where nothing branches.
    """

    mixed: jax.Array
    rates: jax.Array
    segment: jax.Array
    branch: jax.Array | None


Recurrence = Callable[[Inputs, RecurrentState], tuple[jax.Array, RecurrentState]]
"""From tokens that continue from a state: the output of each, and the state after them."""


class Conv(nnx.Module):
    """The weights of a causal depthwise convolution.

    Args:
        channels: number of channels.
        size: kernel size in tokens.
        bias: whether each channel has one; its initial value is zero.
        rngs: draws the weights, normal with variance 1 / size.
        param_dtype: dtype of the weights.
    """

    def __init__(self, channels: int, size: int, *, bias: bool = False, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        values = jax.random.normal(rngs.params(), (channels, 1, size), jnp.float32) * size**-0.5
        self.weight = nnx.Param(values.astype(param_dtype), axes=("conv", None, None))  # [channels, 1, size]
        self.bias = nnx.Param(jnp.zeros((channels,), param_dtype), axes=("conv",)) if bias else None


def run_row(
    recurrence: Recurrence, inputs: Inputs, state: RecurrentState, row: RowLayout | None, *, continues: bool
) -> tuple[jax.Array, RecurrentState]:
    """The outputs of a row, and the state after its last real token; of a row with branches that of the first part.

    Args:
        recurrence: of one sequence after another.
        inputs: of the row. In a packed row, or without a layout, the tokens of a segment are adjacent, those of its
            prompt first, then those of each branch.
        state: before the row.
        row: its layout, if it is known.
        continues: whether the row continues a sequence, of which `state` is the state.
    """
    if continues or (row is not None and not row.packed):
        return _branches(recurrence, inputs._replace(branch=None), state, None if continues else row)
    return recurrence(inputs, state)


def _branches(
    recurrence: Recurrence, inputs: Inputs, state: RecurrentState, row: RowLayout | None
) -> tuple[jax.Array, RecurrentState]:
    """Computes the first part of a row once, and all that follow it in parallel, each from the state after it."""
    # One sequence: whatever its segment id is, it continues from the state.
    inputs = inputs._replace(segment=(inputs.segment > 0).astype(jnp.int32))
    if row is None or len(row.parts) == 1:
        return recurrence(inputs, state)

    def part(start: int, size: int, filled: int) -> Inputs:
        return jax.tree.map(
            lambda x: jnp.pad(x[:, start : start + size], ((0, 0), (0, filled - size)) + ((0, 0),) * (x.ndim - 2)),
            inputs,
        )

    first, *others = row.parts
    out, state = recurrence(part(0, first, first), state)
    longest = max(others)
    starts = [first + sum(others[:number]) for number in range(len(others))]
    parts = [part(start, size, longest) for start, size in zip(starts, others, strict=True)]

    def rows(*of_parts: jax.Array) -> jax.Array:  # the parts of a row stay on one device
        stacked = jnp.stack(of_parts, axis=1)
        return stacked.reshape(-1, *stacked.shape[2:])

    after, _ = recurrence(jax.tree.map(rows, *parts), jax.tree.map(lambda x: rows(*[x] * len(others)), state))
    after = after.reshape(len(out), len(others), *after.shape[1:])
    branches = [out, *(after[:, number, :size] for number, size in enumerate(others))]
    unused = jnp.zeros((len(out), row.size - sum(row.parts), *out.shape[2:]), out.dtype)
    return jnp.concatenate([*branches, unused], axis=1), state


def short_conv(
    inputs: Inputs,
    conv_state: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> tuple[jax.Array, jax.Array]:
    """The causal convolution over the tokens of a row, and an activation.

    Args:
        inputs: of the row.
        conv_state: see `RecurrentState`; its channels are in the order of `inputs.mixed`.
        kernel: `[K, W, size]`.
        bias: `[K, W]`, or None.
        activation: after the convolution.

    Returns:
        (`[B, T, K, W]` in the dtype of `inputs.mixed`, the `conv_state` after the last real token).
    """
    (batch, length), size, real = inputs.segment.shape, kernel.shape[-1], inputs.segment > 0
    mixed = jnp.where(real[:, :, None, None], inputs.mixed, 0)
    tail = conv_state.astype(mixed.dtype).reshape(batch, len(kernel), -1, size - 1)
    inputs_before = jnp.concatenate([jnp.moveaxis(tail, -1, 1), mixed], axis=1)  # [B, size - 1 + T, K, W]
    window, kernel = _conv_inputs(mixed, inputs_before, inputs, size), kernel.astype(jnp.float32)
    total: Any = sum(x.astype(jnp.float32) * kernel[..., offset] for offset, x in enumerate(window))
    total = total if bias is None else total + bias.astype(jnp.float32)
    # The inputs at the last slots up to the last real token; the old ones precede the first token.
    used = jnp.max(jnp.where(real, jnp.arange(1, length + 1), 0), axis=1)  # [B]
    tail = _take_slots(inputs_before, used[:, None] + jnp.arange(size - 1))
    tail = jnp.moveaxis(tail, 1, -1).reshape(conv_state.shape)
    return activation(total).astype(mixed.dtype), tail.astype(conv_state.dtype)


def _conv_inputs(mixed: jax.Array, inputs_before: jax.Array, inputs: Inputs, size: int) -> list[jax.Array]:
    """The convolution's inputs for each token: the token `size - 1` positions before it, ..., the token itself."""
    length = mixed.shape[1]
    if inputs.branch is None:
        return [inputs_before[:, start : start + length] for start in range(size)]
    # The previous slot of each token, -1 for none: the last real one, or the prompt's last where a branch begins.
    slots = jnp.arange(length)[None, :]

    def latest(where: jax.Array) -> jax.Array:  # before each slot
        return jnp.pad(
            jax.lax.cummax(jnp.where(where, slots, -1), axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1
        )

    def at_slot(x: jax.Array, slot: jax.Array) -> jax.Array:
        return jnp.where(slot >= 0, jnp.take_along_axis(x, jnp.maximum(slot, 0), axis=1), -1)

    real, branch = inputs.segment > 0, inputs.branch
    neighbour, prompt = latest(real), latest(real & (branch == 0))
    follows = (at_slot(branch, neighbour) == branch) | (at_slot(branch, neighbour) == 0)
    before = jnp.where(follows, neighbour, prompt)
    before = jnp.where(real & (at_slot(inputs.segment, before) == inputs.segment), before, -1)  # [B, T]
    windows, slot = [mixed], before
    for _ in range(size - 1):
        windows.insert(0, jnp.where((slot >= 0)[:, :, None, None], _take_slots(mixed, jnp.maximum(slot, 0)), 0))
        slot = at_slot(before, slot)
    return windows


def _take_slots(x: jax.Array, slots: jax.Array) -> jax.Array:
    """`[B, S, ...]`: slots `[B, S]` of `[B, T, ...]`."""
    return jax.vmap(lambda row, index: jnp.take(row, index, axis=0, mode="clip"))(x, slots)


def by_group(channels: jax.Array, widths: Sequence[int], groups: int) -> jax.Array:
    """Channels `[sum of widths, ...]` of several parts, as `[groups, W, ...]` with each group's share of every part."""
    starts = [sum(widths[:number]) for number in range(1, len(widths))]
    parts: list[Any] = jnp.split(channels, starts)
    return jnp.concatenate([part.reshape(groups, -1, *channels.shape[1:]) for part in parts], axis=1)
