"""The MLP, in most families a gated one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import Activation, DecoderConfig
from nnxdsl.models.config.feed_forward import has_gate
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.remat import from_inputs

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """`activation(gate) * up`, of which the backward pass saves the inputs alone."""
    return from_inputs(partial(_gated, activation))(gate, up)


def _gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return _ACTIVATIONS[activation](gate) * up


def squared_relu(up: jax.Array) -> jax.Array:
    """`relu(up)^2`, of which the backward pass saves the input alone."""
    return from_inputs(lambda up: jnp.square(jax.nn.relu(up)))(up)


class MLP(nnx.Module):
    """Gated MLP: down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202); with "relu2" down(relu(up(x))^2).

    Args:
        embed_dim: width of a token.
        mlp_dim: width of the hidden layer.
        activation: of the gate.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(
        self, embed_dim: int, mlp_dim: int, activation: Activation, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ) -> None:
        self.activation: Activation = activation
        self.gate = (
            Linear(embed_dim, mlp_dim, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
            if has_gate(activation)
            else None
        )
        self.up = Linear(embed_dim, mlp_dim, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.down = Linear(mlp_dim, embed_dim, axes=("mlp", "embed"), rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """The MLP of this decoder."""
        return cls(config.embed_dim, config.mlp_dim, config.activation, rngs=rngs, param_dtype=param_dtype)

    def project(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        rows = rows_of(x)
        gate, up = None if self.gate is None else self.gate(rows), self.up(rows)
        hidden = squared_relu(up) if gate is None else gated(self.activation, gate, up)
        hidden = constrain(hidden.reshape(*x.shape[:-1], -1), "batch", "length", "activation_mlp")  # [B, T, F]
        return self.down(hidden)

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, None]:
        """`[B, T, D]` to `[B, T, D]`; there are no router statistics."""
        return self.project(x), None
