"""A gated DeltaNet layer: a short convolution and a recurrent memory in place of attention."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig
from nnxdsl.models.config.feed_forward import Activation
from nnxdsl.models.deltanet.recurrence import Tokens, chunked_delta_rule, step
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.layers.mlp import ACTIVATIONS
from nnxdsl.models.layers.norm import RMSNorm
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.recurrent.order import CHUNK, Order
from nnxdsl.models.recurrent.rows import Conv, Inputs, RecurrentState, by_group, run_row, short_conv
from nnxdsl.models.remat import from_inputs, named


def empty_state(config: GatedDeltaNetConfig, batch: int, dtype: DTypeLike) -> RecurrentState:
    """The state before the first token.

    Args:
        config: of the layer.
        batch: rows.
        dtype: of `conv_state`; the `dtype` of the calls.
    """
    heads = (config.value_heads, config.key_head_dim, config.value_head_dim)
    tail = jnp.zeros((batch, config.channels, config.conv_kernel - 1), dtype)
    return RecurrentState(tail, jnp.zeros((batch, *heads), jnp.float32))


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
        activation: after the convolution.
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
        activation: Activation = "silu",
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        chunk: int = CHUNK,
    ) -> None:
        def linear(width: int, out: int, *axes: str) -> Linear:
            return Linear(width, out, axes=(axes[0], axes[1]), rngs=rngs, param_dtype=param_dtype)

        self.config = config
        self.chunk = chunk
        self.activation: Activation = activation
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
        options = {"norm_eps": config.norm.eps, "activation": config.mlp.activation}
        return cls(config.embed_dim, delta, **options, rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def init_cache(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> RecurrentState:
        """The state of one layer before the first token."""
        assert isinstance(config.linear_attention, GatedDeltaNetConfig)  # it names this class
        return empty_state(config.linear_attention, batch, dtype)

    def __call__(self, x: jax.Array, view: View, past: RecurrentState | None) -> tuple[jax.Array, RecurrentState]:
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
        numbers, row = _Numbers(config, self.chunk, self.activation), view.method.row
        state = empty_state(config, batch, x.dtype) if past is None else past

        def run(weights: _Weights, inputs: Inputs, state: RecurrentState) -> tuple[jax.Array, RecurrentState]:
            return run_row(partial(_continue_from, numbers, weights), inputs, state, row, continues=past is not None)

        inputs = Inputs(mixed, rates, view.positions.segment_ids, view.positions.branch_ids)
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
    activation: Activation


class _Weights(NamedTuple):
    conv: jax.Array  # [channels, 1, size]
    decay_log: jax.Array  # [K G]
    decay_bias: jax.Array  # [K G]


def _continue_from(
    numbers: _Numbers, weights: _Weights, inputs: Inputs, state: RecurrentState
) -> tuple[jax.Array, RecurrentState]:
    """The output `[B, T, K, G, V]` float32 of tokens that continue from a state, and the state after them."""
    config, (batch, length) = numbers.config, inputs.segment.shape
    keys, groups = config.key_heads, config.values_per_key
    if not length:
        return jnp.zeros((batch, 0, keys, groups, config.value_head_dim), jnp.float32), state
    width = keys * config.key_head_dim
    kernel = by_group(weights.conv[:, 0], (width, width, config.channels - 2 * width), keys)  # [K, 2 H + G V, size]
    mixed, conv_state = short_conv(inputs, state.conv_state, kernel, activation=ACTIVATIONS[numbers.activation])
    query, key, value = jnp.split(mixed, [config.key_head_dim, 2 * config.key_head_dim], axis=-1)
    value = value.reshape(batch, length, keys, groups, -1)
    rate, decay = jnp.split(inputs.rates, 2, axis=-1)  # [B, T, K, G]
    speed, bias = (x.astype(jnp.float32).reshape(keys, groups) for x in (weights.decay_log, weights.decay_bias))
    decay = -jnp.exp(speed) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
    rate = jax.nn.sigmoid(rate).astype(jnp.float32)
    tokens = Tokens(query, key, value, decay, rate if config.rate_scale == 1.0 else config.rate_scale * rate)
    memory = state.memory.reshape(batch, keys, groups, *state.memory.shape[2:])
    if length == 1:
        out, memory = step(tokens, inputs.segment[:, 0] > 0, memory)
    else:
        out, memory = chunked_delta_rule(tokens, Order(inputs.segment, inputs.branch), memory, numbers.chunk)
    return out, RecurrentState(conv_state, memory.reshape(state.memory.shape))
