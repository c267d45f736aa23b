"""Rotary position embeddings: tables of angles, and their application."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.models.config.attention import QueryTemperature
from nnxdsl.models.config.rope import DynamicNTK, Llama3RopeScaling, LongRope, Rope, Yarn


def rope_tables(
    position: jax.Array, head_dim: int, rope: Rope, length: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sines and cosines of rotary positions.

    Args:
        position: `[B, T]` integers.
        head_dim: width of a head.
        rope: base wavelength, scaling and the rotary part of a head.
        length: tokens of the sequence of each token, `[B, T]`, where positions depend on it; None for short sequences.

    Returns:
        (sin, cos), each `[B, T, rotary dimensions // 2]` float32.
    """
    if rope.partial == "first":
        head_dim = int(head_dim * rope.partial_rotary_factor)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = np.float32(1.0) / np.float32(rope.theta) ** exponent  # radians per position
    if rope.partial == "proportional":
        frequency[int(rope.partial_rotary_factor * head_dim // 2) :] = 0
    scaled: np.ndarray | jax.Array
    scaled, amplitude = frequency / np.float32(rope.factor), 1.0
    if isinstance(rope.scaling, DynamicNTK):
        scaled = frequency if length is None else _dynamic(rope.scaling, rope, head_dim, exponent, length)
    elif isinstance(rope.scaling, Llama3RopeScaling):
        ramp = rope.scaling
        rotations = frequency * np.float32(ramp.original_max_position_embeddings / (2 * np.pi))
        low, high = np.float32(ramp.low_freq_factor), np.float32(ramp.high_freq_factor)
        unscaled = np.clip((rotations - low) / (high - low), 0, 1) if low < high else np.float32(rotations > low)
        scaled = (1 - unscaled) * scaled + unscaled * frequency
    elif isinstance(rope.scaling, LongRope):
        longrope, amplitude = rope.scaling, rope.scaling.attention_factor
        scaled, long = (
            frequency / np.asarray(factor, np.float32) for factor in (longrope.short_factor, longrope.long_factor)
        )
        if length is not None:
            scaled = jnp.where((length > longrope.original_max_position_embeddings)[..., None], long, scaled)
    elif rope.scaling is not None:
        unscaled, amplitude = _yarn_unscaled_share(rope.scaling, head_dim, rope.theta), rope.scaling.attention_factor
        scaled = (1 - unscaled) * scaled + unscaled * frequency
    angle = position[..., None].astype(jnp.float32) * scaled  # [B, T, H/2]
    if amplitude == 1.0:
        return jnp.sin(angle), jnp.cos(angle)
    return jnp.sin(angle) * np.float32(amplitude), jnp.cos(angle) * np.float32(amplitude)


def _dynamic(scaling: DynamicNTK, rope: Rope, width: int, exponent: np.ndarray, length: jax.Array) -> jax.Array:
    """The frequencies of tokens whose sequences have so many tokens, `[B, T, width // 2]`."""
    original, factor = scaling.original_max_position_embeddings, rope.factor
    ratio = jnp.maximum(length, original).astype(jnp.float32) / original  # [B, T]
    base = rope.theta * (factor * ratio - (factor - 1)) ** (width / (width - 2))
    return 1.0 / base[..., None] ** exponent


def query_factor(position: jax.Array, temperature: QueryTemperature) -> jax.Array:
    """The factor of queries at positions `[B, T]`, float32 `[B, T, 1, 1]`."""
    steps = jnp.floor_divide(position + temperature.offset, temperature.length).astype(jnp.float32)
    return (1 + temperature.beta * jnp.log1p(steps))[..., None, None]


def _yarn_unscaled_share(yarn: Yarn, head_dim: int, base: float) -> np.ndarray:
    """The unscaled share of each frequency, `[head_dim // 2]`."""

    def number(rotations: float) -> float:
        """The real-valued index of the frequency with so many rotations over the original length."""
        return (
            head_dim
            * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(base))
        )

    first, last = number(yarn.beta_fast), number(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(max(last - first, 1e-3))
    return 1 - np.clip(ramp, 0, 1)


def halves_of_pairs(x: jax.Array) -> jax.Array:
    """Heads whose neighbours are rotated against each other, `[..., H]`, as heads whose halves are.

    The same permutation of queries and keys leaves their products unchanged.
    """
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def apply_rotary(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each head's first half against its second half by the angles of `rope_tables`.

    Args:
        x: `[B, T, heads, head_dim]`.
        rope: (sin, cos), each `[B, T, R // 2]`; only the first R dimensions of a head are rotated.

    Returns:
        The rotated heads in the dtype of `x`; float32 inside.
    """
    rotary_dim = 2 * rope[0].shape[-1]
    if not rotary_dim:
        return x  # without rotary positions
    if rotary_dim < x.shape[-1]:
        return jnp.concatenate([apply_rotary(x[..., :rotary_dim], rope), x[..., rotary_dim:]], axis=-1)
    return _rotate(x, *rope)


@jax.custom_vjp
def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    sin, cos = (table[:, :, None, :] for table in (sin, cos))  # [B, T, 1, H/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _rotate_forward(x: jax.Array, sin: jax.Array, cos: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rotate(x, sin, cos), (sin, cos)


def _rotate_backward(tables: tuple[jax.Array, jax.Array], toward: jax.Array) -> tuple[jax.Array, None, None]:
    sin, cos = tables  # positions have no gradient; the transpose of a rotation is its inverse
    return _rotate(toward, -sin, cos), None, None


_rotate.defvjp(_rotate_forward, _rotate_backward)
