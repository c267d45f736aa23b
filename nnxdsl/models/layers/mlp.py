"""The gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import Activation, DecoderConfig
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.remat import from_inputs

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def _gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return _ACTIVATIONS[activation](gate) * up


class MLP(nnx.Module):
    """Gated MLP: down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202).

    Args:
        config: the decoder's numbers.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        embed, mlp = config.embed_dim, config.mlp_dim
        self.activation: Activation = config.activation
        self.gate = Linear(embed, mlp, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.up = Linear(embed, mlp, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.down = Linear(mlp, embed, axes=("mlp", "embed"), rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        rows = rows_of(x)
        hidden = from_inputs(partial(_gated, self.activation))(self.gate(rows), self.up(rows))
        hidden = constrain(hidden.reshape(*x.shape[:-1], -1), "batch", "length", "activation_mlp")  # [B, T, F]
        return self.down(hidden)
