"""A Mamba-2 layer: a short convolution and a state-space recurrence in place of attention."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.mamba2 import Mamba2Config
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.mamba2.recurrence import Tokens, chunked_scan, step
from nnxdsl.models.recurrent.order import CHUNK, Order
from nnxdsl.models.recurrent.rows import Conv, Inputs, RecurrentState, by_group, run_row, short_conv
from nnxdsl.models.remat import from_inputs, named


class Mamba2(nnx.Module):
    """The Mamba-2 mixer (Dao and Gu, arXiv:2405.21060, section 7), as Nemotron-H has it.

    `inputs` gives the gates of all heads, then x of all heads, B of all groups and C, then the time steps of all heads.
    x, B and C go through the convolution. The recurrence is that of `recurrence.py` with
    `dt = clip(softplus(dt + dt_bias))` and `decay = -exp(a_log) dt`; `skip * x` is added to its output (D of the
    paper). The output times `silu(gate)` goes through an RMSNorm over each group of heads.

    Args:
        embed_dim: width of the residual stream.
        config: the heads.
        norm_eps: added to the mean square in the norm of each group.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
        chunk: tokens of a chunk, a power of two.
    """

    def __init__(
        self,
        embed_dim: int,
        config: Mamba2Config,
        *,
        norm_eps: float,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        chunk: int = CHUNK,
    ) -> None:
        options = {"rngs": rngs, "param_dtype": param_dtype}
        self.config, self.chunk, self.norm_eps = config, chunk, norm_eps
        heads, inner, channels = config.num_heads, config.inner_dim, sum(config.conv_widths)
        width, bias = inner + channels + heads, config.proj_bias
        self.inputs = Linear(embed_dim, width, axes=("embed", "heads"), bias=bias, **options)
        self.conv = Conv(channels, config.conv_kernel, bias=config.conv_bias, **options)
        # Initial values of the paper's code: A uniform in [1, 16], time steps log-uniform in [0.001, 0.1].
        rate = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1.0, 16.0)
        first = jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32, jnp.log(1e-3), jnp.log(0.1)))
        self.a_log = nnx.Param(jnp.log(rate).astype(param_dtype), axes=("heads",))
        self.dt_bias = nnx.Param((first + jnp.log(-jnp.expm1(-first))).astype(param_dtype), axes=("heads",))
        self.skip = nnx.Param(jnp.ones((heads,), param_dtype), axes=("heads",))
        self.norm = GroupScale(inner, param_dtype=param_dtype)
        self.output = Linear(inner, embed_dim, axes=("heads", "embed"), bias=bias, **options)

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """A Mamba-2 mixer of this decoder."""
        mamba = config.linear_attention
        assert isinstance(mamba, Mamba2Config)  # it names this class
        return cls(config.embed_dim, mamba, norm_eps=config.norm.eps, rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def init_cache(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> RecurrentState:
        """The state of one layer before the first token."""
        assert isinstance(config.linear_attention, Mamba2Config)  # it names this class
        return empty_state(config.linear_attention, batch, dtype)

    def __call__(self, x: jax.Array, view: View, past: RecurrentState | None) -> tuple[jax.Array, RecurrentState]:
        """`[B, T, D]` to `[B, T, D]` and the state after this call's tokens, which takes the place of `past`.

        Args:
            x: the normed residual stream.
            view: positions and row layout of this call, as `run_row` reads them. With `past`, tokens are of one
                sequence, with padding before or after them.
            past: the state before this call, or None.

        Returns:
            (the output, the state after the last real token; of a row with branches that of the first part).
        """
        config, (batch, length, _) = self.config, x.shape
        gate, mixed, dt = self._projected(x)
        bias = None if self.conv.bias is None else self.conv.bias[...]
        weights = _Weights(self.conv.weight[...], bias, self.a_log[...], self.dt_bias[...], self.skip[...])
        state = empty_state(config, batch, x.dtype) if past is None else past

        def run(weights: _Weights, inputs: Inputs, state: RecurrentState) -> tuple[jax.Array, RecurrentState]:
            recurrence = partial(_continue_from, config, self.chunk, weights)
            return run_row(recurrence, inputs, state, view.method.row, continues=past is not None)

        inputs = Inputs(mixed, dt, view.positions.segment_ids, view.positions.branch_ids)
        out, state = jax.checkpoint(run)(weights, inputs, state)  # saves only its inputs, under every remat policy
        scale = self.norm.scale[...].reshape(config.n_groups, -1)
        out = from_inputs(partial(_gated_norm, self.norm_eps, x.dtype))(out, gate, scale)
        out = constrain(out.reshape(batch, length, -1), "batch", "length", "activation_heads")
        return self.output(named(out, "attention_output")), state

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of each group: gates `[B, T, K, G P]`; x, B and C `[B, T, K, G P + 2 N]`; time steps `[B, T, K, G]`."""
        config, before = self.config, x.shape[:2]
        widths = (config.inner_dim, *config.conv_widths, config.num_heads)
        starts = [sum(widths[:number]) for number in range(1, len(widths))]

        # The recurrence needs whole rows: their length is gathered here if it is sharded.
        def groups(part: jax.Array) -> jax.Array:
            part = part.reshape(*before, config.n_groups, -1)
            return constrain(part, "batch", None, "activation_heads", None)

        gate, *mixed, dt = map(groups, jnp.split(self.inputs(rows_of(x)), starts, axis=-1))
        return gate, jnp.concatenate(mixed, axis=-1), dt


class GroupScale(nnx.Module):
    """The scale of the norm of each group of heads.

    Args:
        features: of all groups.
        param_dtype: dtype of the scale.
    """

    def __init__(self, features: int, *, param_dtype: DTypeLike) -> None:
        self.scale = nnx.Param(jnp.ones((features,), param_dtype), axes=("heads",))


def empty_state(config: Mamba2Config, batch: int, dtype: DTypeLike) -> RecurrentState:
    """The state before the first token.

    Args:
        config: of the layer.
        batch: rows.
        dtype: of `conv_state`; the `dtype` of the calls.
    """
    tail = jnp.zeros((batch, sum(config.conv_widths), config.conv_kernel - 1), dtype)
    return RecurrentState(tail, jnp.zeros((batch, config.num_heads, config.state_size, config.head_dim), jnp.float32))


class _Weights(NamedTuple):
    conv: jax.Array  # [channels, 1, size]
    conv_bias: jax.Array | None  # [channels]
    a_log: jax.Array  # [K G]
    dt_bias: jax.Array  # [K G]
    skip: jax.Array  # [K G]


def _time_steps(rates: jax.Array, limit: tuple[float, float]) -> jax.Array:
    return jnp.clip(jax.nn.softplus(rates), *limit)


def _gated_norm(eps: float, dtype: DTypeLike, out: jax.Array, gate: jax.Array, scale: jax.Array) -> jax.Array:
    """Outputs `[B, T, K, G, P]` float32 times their gates, normed over each group; `[B, T, K, G P]` in `dtype`."""
    gated = out.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
    normed = gated * jax.lax.rsqrt(jnp.mean(jnp.square(gated), axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(dtype)


def _continue_from(
    config: Mamba2Config, chunk: int, weights: _Weights, inputs: Inputs, state: RecurrentState
) -> tuple[jax.Array, RecurrentState]:
    """The output `[B, T, K, G, P]` float32 of tokens that continue from a state, and the state after them."""
    batch, length = inputs.segment.shape
    groups, heads, width = config.n_groups, config.heads_per_group, config.head_dim
    if not length:
        return jnp.zeros((batch, 0, groups, heads, width), jnp.float32), state
    kernel = by_group(weights.conv[:, 0], config.conv_widths, groups)  # [K, G P + 2 N, size]
    bias = None if weights.conv_bias is None else by_group(weights.conv_bias, config.conv_widths, groups)
    mixed, conv_state = short_conv(inputs, state.conv_state, kernel, bias)
    x, b, c = jnp.split(mixed.astype(jnp.float32), [heads * width, heads * width + config.state_size], axis=-1)
    x = x.reshape(batch, length, groups, heads, width)
    a_log, dt_bias, skip = (
        part.astype(jnp.float32).reshape(groups, heads) for part in (weights.a_log, weights.dt_bias, weights.skip)
    )
    dt = _time_steps(inputs.rates.astype(jnp.float32) + dt_bias, config.time_step_limit)
    tokens = Tokens(c, b, x, dt, -jnp.exp(a_log) * dt)
    memory = state.memory.reshape(batch, groups, heads, *state.memory.shape[2:])
    if length == 1:
        out, memory = step(tokens, inputs.segment[:, 0] > 0, memory)
    else:
        out, memory = chunked_scan(tokens, Order(inputs.segment, inputs.branch), memory, chunk)
    return out + skip[..., None] * x, RecurrentState(conv_state, memory.reshape(state.memory.shape))
