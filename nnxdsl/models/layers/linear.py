"""Linear layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.logical_axes import is_constrained
from nnxdsl.models.remat import named


def rows_of(x: jax.Array) -> jax.Array:
    """`[..., D]` as rows `[N, D]`, one for each token; unchanged where the other axes may be sharded.

    A weight's gradient sums over all leading axes. Over two of them XLA for CPUs first transposes the whole cotangent,
    which takes as long as the products. Make rows once for several Linears: each saves its own input for the backward
    pass.
    """
    return x if is_constrained() else x.reshape(-1, x.shape[-1])


class Linear(nnx.Module):
    """`x @ kernel`, and in some families a bias.

    qwix replaces the weight of this dot by a quantized one. So each Linear has one weight, and only a necessary cast is
    between the weight and the dot.

    Args:
        in_features: length of the last axis of the input.
        out_features: length of the last axis of the output.
        axes: logical names of the kernel's (in, out) axes, stored as the metadata `axes`.
        rngs: draws the kernel, normal with variance 1 / in_features, from its `params` stream.
        param_dtype: dtype of the kernel and of the bias.
        bias: whether there is one; its initial value is zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str, str],
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        bias: bool = False,
    ) -> None:
        values = jax.random.normal(rngs.params(), (in_features, out_features), jnp.float32) * in_features**-0.5
        self.kernel = nnx.Param(values.astype(param_dtype), axes=axes)  # [in, out]
        self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype), axes=axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., in] -> [..., out]`, in the dtype of `x`."""
        product = self._product(rows_of(x))
        if self.bias is not None:
            product = product + self.bias[...].astype(x.dtype)
        return named(product.reshape(*x.shape[:-1], -1), "product")

    def _product(self, x: jax.Array) -> jax.Array:
        # A quantized weight is no Variable. An unnecessary cast would hide a weight from qwix while tracing.
        kernel = self.kernel.get_value() if isinstance(self.kernel, nnx.Variable) else self.kernel
        if not isinstance(kernel, jax.Array):
            # Dequantized again in the backward pass: the dequantized weight is as large as the original.
            return jax.checkpoint(lambda x: jnp.dot(x, kernel))(x).astype(x.dtype)
        if kernel.dtype != x.dtype:
            kernel = kernel.astype(x.dtype)
        return jnp.dot(x, kernel).astype(x.dtype)
