"""RMS norms, and the layer norm."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.norm import NormScale
from nnxdsl.models.remat import from_inputs


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467): x / rms(x) * scale, or * (1 + scale) where that is zero-centred.

    Args:
        features: length of the last axis.
        axis: logical name of that axis.
        eps: added to the mean square.
        kind: initial value of the scale, and whether values are rounded before or after it is applied.
        param_dtype: dtype of the scale.
    """

    def __init__(self, features: int, *, axis: str, eps: float, kind: NormScale, param_dtype: DTypeLike) -> None:
        self.eps = eps
        self.kind: NormScale = kind
        first = jnp.zeros if kind == "zero_centred" else jnp.ones
        self.scale = nnx.Param(first((features,), param_dtype), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., features]` to the same; float32 inside, the dtype of `x` outside."""
        return from_inputs(partial(_normed, self.eps, self.kind))(x, self.scale[...])


def _normed(eps: float, kind: NormScale, x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if kind == "plain":  # Llama rounds before the scale, Gemma after it
        return wide.astype(x.dtype) * scale.astype(x.dtype)
    wide_scale = scale.astype(jnp.float32)
    return (wide * (wide_scale if kind == "wide" else 1.0 + wide_scale)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm (Ba et al., arXiv:1607.06450): (x - mean) / standard deviation * scale + bias.

    Args:
        features: length of the last axis.
        axis: logical name of that axis.
        eps: added to the variance.
        param_dtype: dtype of scale and bias.
    """

    def __init__(self, features: int, *, axis: str, eps: float, param_dtype: DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,), param_dtype), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., features]` to the same; float32 inside, the dtype of `x` outside."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale, bias = (part[...].astype(jnp.float32) for part in (self.scale, self.bias))
        return (wide * scale + bias).astype(x.dtype)


def unscaled_norm(x: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x)` over the last axis: an RMSNorm without scale; float32 inside."""
    return from_inputs(partial(_unscaled, eps))(x)


def _unscaled(eps: float, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)


def norm_of(
    config: DecoderConfig,
    features: int,
    axis: str,
    param_dtype: DTypeLike,
    *,
    eps: float | None = None,
    kind: NormScale | None = None,
) -> RMSNorm:
    """A norm over an axis of this length and logical name, with the decoder's settings where it has none of its own."""
    eps, kind = eps or config.norm.eps, kind or config.norm.scale
    return RMSNorm(features, axis=axis, eps=eps, kind=kind, param_dtype=param_dtype)
