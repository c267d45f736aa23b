"""The MLP, in most families a gated one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import Activation, MLPConfig
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.remat import from_inputs

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""The functions, by their names in MLPConfig."""


def activate(activation: Activation, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """`activation(gate) * up`, without a gate `activation(up)`; the backward pass saves the inputs alone."""
    if gate is None:
        return from_inputs(ACTIVATIONS[activation])(up)
    return from_inputs(lambda gate, up: ACTIVATIONS[activation](gate) * up)(gate, up)


class MLP(nnx.Module):
    """Gated MLP: down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202); or down(activation(up(x))).

    Args:
        embed_dim: width of a token.
        config: its width, activation, gate and biases.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, embed_dim: int, config: MLPConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        self.activation: Activation = config.activation
        options: dict[str, Any] = {"rngs": rngs, "param_dtype": param_dtype, "bias": config.bias}
        self.gate = Linear(embed_dim, config.dim, axes=("embed", "mlp"), **options) if config.gate else None
        self.up = Linear(embed_dim, config.dim, axes=("embed", "mlp"), **options)
        self.down = Linear(config.dim, embed_dim, axes=("mlp", "embed"), **options)

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """The MLP of this decoder."""
        return cls(config.embed_dim, config.mlp, rngs=rngs, param_dtype=param_dtype)

    def project(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        rows = rows_of(x)
        gate, up = None if self.gate is None else self.gate(rows), self.up(rows)
        hidden = activate(self.activation, up, gate)
        hidden = constrain(hidden.reshape(*x.shape[:-1], -1), "batch", "length", "activation_mlp")  # [B, T, F]
        return self.down(hidden)

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, None]:
        """`[B, T, D]` to `[B, T, D]`; there are no router statistics."""
        return self.project(x), None
