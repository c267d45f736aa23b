"""A gated DeltaNet layer: a short convolution and a recurrent memory in place of attention."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig
from nnxdsl.models.deltanet.recurrence import CHUNK, Order, Tokens, chunked_delta_rule, step
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.layers.norm import RMSNorm
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.remat import from_inputs, named

if TYPE_CHECKING:
    from nnxdsl.models.attention.view import View


class DeltaState(NamedTuple):
    """The recurrent state of a layer, of constant size; any leading axes, then those below.

    Attributes:
        conv_state: `[B, channels, conv_kernel - 1]`, the convolution's inputs at the last tokens; zeros at first.
        memory: `[B, value_heads, key_head_dim, value_head_dim]` float32.
    """

    conv_state: jax.Array
    memory: jax.Array


def empty_state(config: GatedDeltaNetConfig, batch: int, dtype: DTypeLike) -> DeltaState:
    """The state before the first token.

    Args:
        config: of the layer.
        batch: rows.
        dtype: of `conv_state`; the `dtype` of the calls.
    """
    heads = (config.value_heads, config.key_head_dim, config.value_head_dim)
    tail = jnp.zeros((batch, config.channels, config.conv_kernel - 1), dtype)
    return DeltaState(tail, jnp.zeros((batch, *heads), jnp.float32))


class Conv(nnx.Module):
    """The weights of a causal depthwise convolution.

    Args:
        channels: number of channels.
        size: kernel size in tokens.
        rngs: draws the weights, normal with variance 1 / size.
        param_dtype: dtype of the weights.
    """

    def __init__(self, channels: int, size: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        values = jax.random.normal(rngs.params(), (channels, 1, size), jnp.float32) * size**-0.5
        self.weight = nnx.Param(values.astype(param_dtype), axes=("conv", None, None))  # [channels, 1, size]


class GatedDeltaNet(nnx.Module):
    """The gated DeltaNet of Qwen3-Next (Yang et al., arXiv:2412.06464).

    With joined projections `inputs` gives each key head's query and key, then values and output gates of its value
    heads; `rates` gives each key head's rates, then decays, of its value heads, so that heads can be sharded without
    communication. With separate ones `inputs` gives all queries, then all keys, then all values, as are the
    convolution's channels; `output_gate`, `rate` and `decay` give theirs of each value head.

    Args:
        embed_dim: width of the residual stream.
        config: the heads.
        norm_eps: added to the mean square in the norm of each head.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
        chunk: tokens of a chunk, a power of two.
    """

    def __init__(
        self,
        embed_dim: int,
        config: GatedDeltaNetConfig,
        *,
        norm_eps: float,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        chunk: int = CHUNK,
    ) -> None:
        def linear(width: int, out: int, *axes: str) -> Linear:
            return Linear(width, out, axes=(axes[0], axes[1]), rngs=rngs, param_dtype=param_dtype)

        self.config = config
        self.chunk = chunk
        heads, values = config.value_heads, config.value_heads * config.value_head_dim
        if config.projections == "joined":
            self.inputs = linear(embed_dim, config.channels + values, "embed", "heads")
            self.rates = linear(embed_dim, 2 * heads, "embed", "heads")
        else:
            if config.projections == "separate":
                self.inputs = linear(embed_dim, config.channels, "embed", "heads")
            else:
                width = config.key_heads * config.key_head_dim
                self.query = linear(embed_dim, width, "embed", "heads")
                self.key = linear(embed_dim, width, "embed", "heads")
                self.value = linear(embed_dim, values, "embed", "heads")
            self.output_gate = linear(embed_dim, values, "embed", "heads")
            self.rate = linear(embed_dim, heads, "embed", "heads")
            self.decay = linear(embed_dim, heads, "embed", "heads")
        conv = partial(Conv, size=config.conv_kernel, rngs=rngs, param_dtype=param_dtype)
        if config.projections == "single":
            width = config.key_heads * config.key_head_dim
            self.conv_query, self.conv_key, self.conv_value = conv(width), conv(width), conv(values)
        else:
            self.conv = conv(config.channels)
        # Initial decay rates are uniform up to 16 (Mamba 2, arXiv:2405.21060).
        rate = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1e-3, 16.0)
        self.decay_log = nnx.Param(jnp.log(rate).astype(param_dtype), axes=("heads",))
        self.decay_bias = nnx.Param(jnp.ones((heads,), param_dtype), axes=("heads",))
        dim = config.value_head_dim
        self.norm = RMSNorm(
            dim, axis="head_dim", eps=config.norm_eps or norm_eps, kind="plain", param_dtype=param_dtype
        )
        self.output = linear(values, embed_dim, "heads", "embed")

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """A gated DeltaNet of this decoder."""
        delta = config.linear_attention
        assert isinstance(delta, GatedDeltaNetConfig)  # it names this class
        return cls(config.embed_dim, delta, norm_eps=config.norm_eps, rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def init_cache(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> DeltaState:
        """The state of one layer before the first token."""
        assert isinstance(config.linear_attention, GatedDeltaNetConfig)  # it names this class
        return empty_state(config.linear_attention, batch, dtype)

    def __call__(self, x: jax.Array, view: View, past: DeltaState | None) -> tuple[jax.Array, DeltaState]:
        """`[B, T, D]` to `[B, T, D]` and the state after this call's tokens, which takes the place of `past`.

        Args:
            x: the normed residual stream.
            view: positions and row layout of this call. In a packed row, or without a layout, the tokens of a segment
                are adjacent, those of its prompt first, then those of each branch. With `past`, tokens are of one
                sequence, with padding before or after them.
            past: the state before this call, or None.

        Returns:
            (the output, the state after the last real token; of a row with branches that of the first part).
        """
        config, (batch, length, _) = self.config, x.shape
        mixed, rates, gate = self._projected(x)
        if config.projections == "single":
            parts = (self.conv_query, self.conv_key, self.conv_value)
            conv = jnp.concatenate([part.weight[...] for part in parts])
        else:
            conv = self.conv.weight[...]
        weights = _Weights(conv, self.decay_log[...], self.decay_bias[...])
        numbers, row = _Numbers(config, self.chunk), view.method.row if past is None else None
        state = empty_state(config, batch, x.dtype) if past is None else past

        def run(weights: _Weights, inputs: _Inputs, state: DeltaState) -> tuple[jax.Array, DeltaState]:
            if past is not None or (row is not None and not row.packed):
                return _branches(numbers, weights, inputs._replace(branch=None), state, row)
            return _continue_from(numbers, weights, inputs, state)

        inputs = _Inputs(mixed, rates, view.positions.segment_ids, view.positions.branch_ids)
        out, state = jax.checkpoint(run)(weights, inputs, state)  # saves only its inputs, under every remat policy
        out = from_inputs(_output_gate)(self.norm(out.astype(x.dtype)), gate.reshape(out.shape))
        out = out.reshape(batch, length, -1)  # [B, T, K G V]
        out = constrain(out, "batch", "length", "activation_heads")
        return self.output(named(out, "attention_output")), state

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of each key head: queries, keys and values; rates and decays; output gates. `[B, T, K, ...]`."""
        config, before = self.config, x.shape[:2]
        x = rows_of(x)

        # The recurrence needs whole rows: their length is gathered here if it is sharded.
        def heads(part: jax.Array) -> jax.Array:
            part = part.reshape(*before, config.key_heads, -1)
            return constrain(part, "batch", None, "activation_heads", None)

        if config.projections == "joined":
            mixed = heads(self.inputs(x))  # [B, T, K, 2 H + 2 G V]
            rates = heads(self.rates(x))
            mixed, gate = jnp.split(
                mixed, [2 * config.key_head_dim + config.values_per_key * config.value_head_dim], -1
            )
            return mixed, rates, gate
        if config.projections == "single":
            parts = [self.query(x), self.key(x), self.value(x)]
        else:
            width = config.key_heads * config.key_head_dim
            parts = jnp.split(self.inputs(x), [width, 2 * width], axis=-1)
        mixed = jnp.concatenate([heads(part) for part in parts], axis=-1)  # [B, T, K, 2 H + G V]
        rates = jnp.concatenate([heads(self.rate(x)), heads(self.decay(x))], axis=-1)
        return mixed, rates, heads(self.output_gate(x))


def _output_gate(out: jax.Array, gate: jax.Array) -> jax.Array:
    """Applies the output gate, in the dtype of `out`."""
    return (out * jax.nn.silu(gate.astype(jnp.float32))).astype(out.dtype)


class _Numbers(NamedTuple):
    """Static arguments."""

    config: GatedDeltaNetConfig
    chunk: int


class _Weights(NamedTuple):
    conv: jax.Array  # [channels, 1, size]
    decay_log: jax.Array  # [K G]
    decay_bias: jax.Array  # [K G]


class _Inputs(NamedTuple):
    """Of slots `[B, T]`."""

    mixed: jax.Array  # [B, T, K, 2 H + G V], before the convolution
    rates: jax.Array  # [B, T, K, 2 G]
    segment: jax.Array  # [B, T]
    branch: jax.Array | None  # [B, T]; None where nothing branches


def _branches(
    numbers: _Numbers, weights: _Weights, inputs: _Inputs, state: DeltaState, row: RowLayout | None
) -> tuple[jax.Array, DeltaState]:
    """Computes the first part of a row once, and all that follow it in parallel, each from the state after it."""
    # One sequence: whatever its segment id is, it continues from the state.
    inputs = inputs._replace(segment=(inputs.segment > 0).astype(jnp.int32))
    if row is None or len(row.parts) == 1:
        return _continue_from(numbers, weights, inputs, state)

    def part(start: int, size: int, filled: int) -> _Inputs:
        return jax.tree.map(
            lambda x: jnp.pad(x[:, start : start + size], ((0, 0), (0, filled - size)) + ((0, 0),) * (x.ndim - 2)),
            inputs,
        )

    first, *others = row.parts
    out, state = _continue_from(numbers, weights, part(0, first, first), state)
    longest = max(others)
    starts = [first + sum(others[:number]) for number in range(len(others))]
    parts = [part(start, size, longest) for start, size in zip(starts, others, strict=True)]

    def rows(*of_parts: jax.Array) -> jax.Array:  # the parts of a row stay on one device
        stacked = jnp.stack(of_parts, axis=1)
        return stacked.reshape(-1, *stacked.shape[2:])

    after, _ = _continue_from(
        numbers, weights, jax.tree.map(rows, *parts), jax.tree.map(lambda x: rows(*[x] * len(others)), state)
    )
    after = after.reshape(len(out), len(others), *after.shape[1:])
    found = [out, *(after[:, number, :size] for number, size in enumerate(others))]
    unused = jnp.zeros((len(out), row.size - sum(row.parts), *out.shape[2:]), out.dtype)
    return jnp.concatenate([*found, unused], axis=1), state


def _continue_from(
    numbers: _Numbers, weights: _Weights, inputs: _Inputs, state: DeltaState
) -> tuple[jax.Array, DeltaState]:
    """The output `[B, T, K, G, V]` float32 of tokens that continue from a state, and the state after them."""
    config, (batch, length) = numbers.config, inputs.segment.shape
    keys, groups = config.key_heads, config.values_per_key
    if not length:
        return jnp.zeros((batch, 0, keys, groups, config.value_head_dim), jnp.float32), state
    real = inputs.segment > 0
    mixed = jnp.where(real[:, :, None, None], inputs.mixed, 0)
    tail = state.conv_state.astype(mixed.dtype).reshape(batch, keys, -1, config.conv_kernel - 1)
    inputs_before = jnp.concatenate([jnp.moveaxis(tail, -1, 1), mixed], axis=1)  # [B, size - 1 + T, K, 2 H + G V]
    window = _conv_inputs(mixed, inputs_before, inputs, config.conv_kernel)
    kernel = _by_head(config, weights.conv).astype(jnp.float32)  # [K, 2 H + G V, size]
    mixed = jax.nn.silu(sum(x.astype(jnp.float32) * kernel[..., at] for at, x in enumerate(window))).astype(mixed.dtype)
    query, key, value = jnp.split(mixed, [config.key_head_dim, 2 * config.key_head_dim], axis=-1)
    value = value.reshape(batch, length, keys, groups, -1)
    rate, decay = jnp.split(inputs.rates, 2, axis=-1)  # [B, T, K, G]
    speed, bias = (x.astype(jnp.float32).reshape(keys, groups) for x in (weights.decay_log, weights.decay_bias))
    decay = -jnp.exp(speed) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
    rate = jax.nn.sigmoid(rate).astype(jnp.float32)
    tokens = Tokens(query, key, value, decay, rate if config.rate_scale == 1.0 else config.rate_scale * rate)
    memory = state.memory.reshape(batch, keys, groups, *state.memory.shape[2:])
    if length == 1:
        out, memory = step(tokens, real[:, 0], memory)
    else:
        out, memory = chunked_delta_rule(tokens, Order(inputs.segment, inputs.branch), memory, numbers.chunk)
    # The inputs at the last slots up to the last real token; the old ones precede the first token.
    used = jnp.max(jnp.where(real, jnp.arange(1, length + 1), 0), axis=1)  # [B]
    tail = _take_slots(inputs_before, used[:, None] + jnp.arange(config.conv_kernel - 1))
    tail = jnp.moveaxis(tail, 1, -1).reshape(state.conv_state.shape)
    return out, DeltaState(tail.astype(state.conv_state.dtype), memory.reshape(state.memory.shape))


def _conv_inputs(mixed: jax.Array, inputs_before: jax.Array, inputs: _Inputs, size: int) -> list[jax.Array]:
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

    def at(x: jax.Array, slot: jax.Array) -> jax.Array:
        return jnp.where(slot >= 0, jnp.take_along_axis(x, jnp.maximum(slot, 0), axis=1), -1)

    real, branch = inputs.segment > 0, inputs.branch
    neighbour, prompt = latest(real), latest(real & (branch == 0))
    follows = (at(branch, neighbour) == branch) | (at(branch, neighbour) == 0)
    before = jnp.where(follows, neighbour, prompt)
    before = jnp.where(real & (at(inputs.segment, before) == inputs.segment), before, -1)  # [B, T]
    found, slot = [mixed], before
    for _ in range(size - 1):
        found.insert(0, jnp.where((slot >= 0)[:, :, None, None], _take_slots(mixed, jnp.maximum(slot, 0)), 0))
        slot = at(before, slot)
    return found


def _take_slots(x: jax.Array, slots: jax.Array) -> jax.Array:
    """`[B, S, ...]`: slots `[B, S]` of `[B, T, ...]`."""
    return jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(x, slots)


def _by_head(config: GatedDeltaNetConfig, kernel: jax.Array) -> jax.Array:
    """The convolution's weights `[channels, 1, size]` in the order of `inputs`, `[K, 2 H + G V, size]`."""
    width = config.key_heads * config.key_head_dim
    parts: list[Any] = jnp.split(kernel[:, 0], [width, 2 * width])
    return jnp.concatenate([part.reshape(config.key_heads, -1, kernel.shape[-1]) for part in parts], axis=1)
