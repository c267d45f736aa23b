"""The parts of a decoder that hold weights, each naming its logical axes, and rotary positions; knows no mesh."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import NormScale, Rope, RopeRamp, Yarn
from nnxdsl.models.logical_axes import constrain, is_constrained
from nnxdsl.models.remat import from_inputs, named


def rows_of(x: jax.Array) -> jax.Array:
    """`[..., D]` as rows `[N, D]`, one for each token; as it is where devices may cut the other axes.

    A gradient sums over all leading axes. XLA for CPUs does that over one axis as it stands; over two it first turns
    the whole cotangent over, which takes as long as the products. What several Linears are given is to be made rows
    first: for the backward pass each keeps what it makes itself.
    """
    return x if is_constrained() else x.reshape(-1, x.shape[-1])


class Linear(nnx.Module):
    """`x @ kernel`, and in some families a bias.

    Adapters and quantised weights (qwix) come from outside: they find the weight by watching this dot. So each Linear
    holds one weight, and nothing but a cast that is needed stands between the weight and the dot.

    Args:
        in_features: length of the last axis of the input.
        out_features: length of the last axis of the output.
        axes: logical names of the kernel's (in, out) axes, kept as the metadata `axes`.
        rngs: draws the kernel, normal with variance 1 / in_features, from its `params` stream.
        param_dtype: dtype of the kernel and of the bias.
        bias: whether there is one; it begins at zero.
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
        # A quantised weight is no Variable. A cast that does nothing would hide a weight from qwix while tracing.
        kernel = self.kernel.get_value() if isinstance(self.kernel, nnx.Variable) else self.kernel
        if not isinstance(kernel, jax.Array):
            # Unpacked again for the backward pass: what is unpacked is as large as the weight was before.
            return jax.checkpoint(lambda x: jnp.dot(x, kernel))(x).astype(x.dtype)
        if kernel.dtype != x.dtype:
            kernel = kernel.astype(x.dtype)
        return jnp.dot(x, kernel).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467): x / rms(x) * scale, or * (1 + scale) where that is zero-centred.

    Args:
        features: length of the last axis.
        axis: logical name of that axis.
        eps: added to the mean square.
        kind: what the scale begins with, and whether the product is rounded before or after it.
        param_dtype: dtype of the scale.
    """

    def __init__(self, features: int, *, axis: str, eps: float, kind: NormScale, param_dtype: DTypeLike) -> None:
        self.eps = eps
        self.kind: NormScale = kind
        first = jnp.ones if kind == "plain" else jnp.zeros
        self.scale = nnx.Param(first((features,), param_dtype), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., features]` to the same; float32 inside, the dtype of `x` outside."""
        return from_inputs(partial(_normed, self.eps, self.kind))(x, self.scale[...])


def _normed(eps: float, kind: NormScale, x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if kind == "plain":  # Llama rounds before the scale, Gemma after it
        return wide.astype(x.dtype) * scale.astype(x.dtype)
    return (wide * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)


class Embedding(nnx.Module):
    """The table of token vectors, which is also a tied output head.

    Args:
        vocab_size: rows.
        features: columns.
        scaled: whether vectors are multiplied by the square root of `features`.
        rngs: draws the table, normal with variance 1 / features: so scaled vectors, and logits, have variance 1.
        param_dtype: dtype of the table.
    """

    def __init__(self, vocab_size: int, features: int, *, scaled: bool, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        self.scaled = scaled
        self.embedding = nnx.Param(_rows(vocab_size, features, rngs, param_dtype), axes=("vocab", "embed"))  # [V, D]

    def __call__(self, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Token ids `[B, T]` to vectors `[B, T, D]`; an id outside the table gives NaN.

        The factor is rounded to `dtype` first: the published weights were trained so (55.4256 is 55.5 in bfloat16).
        """
        # Looked up whole: were it cut along D, rows of all devices would have to be brought together afterwards.
        table = constrain(self.embedding[...], "vocab", None)
        vectors = jnp.take(table, tokens, axis=0).astype(dtype)  # [B, T, D]
        return vectors * jnp.asarray(table.shape[-1] ** 0.5, dtype) if self.scaled else vectors


class Head(nnx.Module):
    """An output head with weights of its own, a row for each token as in the embedding.

    Args:
        vocab_size: rows.
        features: columns.
        rngs: draws the rows, normal with variance 1 / features, so that logits have variance 1.
        param_dtype: dtype of the weights.
    """

    def __init__(self, vocab_size: int, features: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        self.kernel = nnx.Param(_rows(vocab_size, features, rngs, param_dtype), axes=("vocab", "embed"))  # [V, D]


def _rows(count: int, features: int, rngs: nnx.Rngs, dtype: DTypeLike) -> jax.Array:
    return (jax.random.normal(rngs.params(), (count, features), jnp.float32) * features**-0.5).astype(dtype)


def rope_tables(position: jax.Array, head_dim: int, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines of rotary positions.

    Args:
        position: `[B, T]` integers.
        head_dim: width of a head; a part of it turns.
        rope: wavelengths, and how they are stretched to reach further than a model was trained for.

    Returns:
        (sin, cos), each `[B, T, turned // 2]` float32.
    """
    head_dim = int(head_dim * rope.part)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1.0) / np.float32(rope.base) ** exponent  # radians per position
    scaled, amplitude = frequency / np.float32(rope.scale), 1.0
    if isinstance(rope.ramp, RopeRamp):
        ramp = rope.ramp
        turns = frequency * np.float32(ramp.length / (2 * np.pi))
        kept = np.clip((turns - np.float32(ramp.slow)) / np.float32(ramp.fast - ramp.slow), 0, 1)
        scaled = (1 - kept) * scaled + kept * frequency
    elif rope.ramp is not None:
        kept, amplitude = _kept_by_yarn(rope.ramp, head_dim, rope.base), rope.ramp.amplitude
        scaled = (1 - kept) * scaled + kept * frequency
    angle = position[..., None].astype(jnp.float32) * scaled  # [B, T, H/2]
    if amplitude == 1.0:
        return jnp.sin(angle), jnp.cos(angle)
    return jnp.sin(angle) * np.float32(amplitude), jnp.cos(angle) * np.float32(amplitude)


def _kept_by_yarn(yarn: Yarn, head_dim: int, base: float) -> np.ndarray:
    """Which part of each frequency stays as it is, `[head_dim // 2]`."""

    def number(turns: float) -> float:
        """Of the frequency that makes so many turns over the length, as a real number."""
        return head_dim * math.log(yarn.length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = number(yarn.fast), number(yarn.slow)
    if yarn.whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(max(last - first, 1e-3))
    return 1 - np.clip(ramp, 0, 1)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns each head's first half against its second half by the angles of `rope_tables`.

    Args:
        x: `[B, T, heads, head_dim]`.
        rope: (sin, cos), each `[B, T, turned // 2]`; what is behind the turned part of a head stays as it is.

    Returns:
        The turned heads in the dtype of `x`; float32 inside.
    """
    turned = 2 * rope[0].shape[-1]
    if turned < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turned], rope), x[..., turned:]], axis=-1)
    return _turned(x, *rope)


@jax.custom_vjp
def _turned(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    sin, cos = (table[:, :, None, :] for table in (sin, cos))  # [B, T, 1, H/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _turned_forward(x: jax.Array, sin: jax.Array, cos: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _turned(x, sin, cos), (sin, cos)


def _turned_backward(kept: tuple[jax.Array, jax.Array], toward: jax.Array) -> tuple[jax.Array, None, None]:
    sin, cos = kept  # nothing is learnt of positions, and what is turned is turned back
    return _turned(toward, -sin, cos), None, None


_turned.defvjp(_turned_forward, _turned_backward)
