"""The mathematics of LoRA and DoRA: initial values, norms and merged weights, and the paths of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.adapter import Adapter, DoRA, LowRank, scale_at
from nnxdsl.models.params import path_in_group

A, B, M = "_lora_a", "_lora_b", "_lora_m"
"""Suffixes of the paths of an adapter's arrays: the matrices A and B, and DoRA's magnitude."""


def is_adapter(path: str) -> bool:
    """Whether a path is that of an adapter's array."""
    return path.endswith((A, B, M))


def kernel_of(path: str) -> str:
    """The path of the weight that an adapter's array belongs to."""
    return path.rpartition("_lora_")[0]


def endings(adapter: LowRank) -> tuple[str, ...]:
    """The suffixes of an adapter's arrays."""
    return (A, B, M) if isinstance(adapter, DoRA) else (A, B)


def disable_adapter(
    leaves: Mapping[str, jax.Array], start: Mapping[str, jax.Array] | None = None
) -> dict[str, jax.Array]:
    """The arrays with the adapter reset to its initial state, in which a new one adds nothing to its base.

    Args:
        leaves: The policy's arrays.
        start: Copies of the initial arrays for which `needs_initial_copy` is true.
    """
    initial_leaves = start or {}
    return {
        path: initial_leaves[path].astype(leaf.dtype)
        if path in initial_leaves
        else jnp.zeros_like(leaf)
        if path.endswith(B)
        else leaf
        for path, leaf in leaves.items()
    }


def needs_initial_copy(adapter: Adapter | None, path: str) -> bool:
    """Whether `disable_adapter` needs a copy of the initial array at a path.

    A new LoRA needs none, since B is zero; a new DoRA needs its magnitudes, which are the norms of the base, rounded;
    an adapter that starts from another one needs all arrays.
    """
    if not isinstance(adapter, LowRank) or not is_adapter(path):
        return False
    return adapter.start is not None or path.endswith(M)


def initial(path: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Initial value of A or B, float32: A is He-uniform over its inputs (He et al. 2015), B is zero."""
    if path.endswith(B):
        return jnp.zeros(shape, jnp.float32)
    bound = (6.0 / shape[-2]) ** 0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def magnitude(weight: jax.Array) -> jax.Array:
    """Initial value of DoRA's m: the norm of a weight `[..., in, out]` over its inputs, `[..., out]` float32."""
    return jnp.sqrt(jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-2))


def norm(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """The norm over inputs of `W + scale A B`, without computing that weight.

    `|w + s A b|^2 = |w|^2 + 2 s b . (A^T w) + s^2 b . (A^T A) b`, with the columns w and b of each output.

    Args:
        weight: `[..., in, out]`.
        a: `[..., in, rank]`.
        b: `[..., rank, out]`.
        scale: Factor of the product.

    Returns:
        `[..., out]` float32.
    """
    high: dict = {"precision": "highest", "preferred_element_type": jnp.float32}
    norm_squares = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-2)
    across = jnp.einsum("...ir,...io->...ro", a, weight.astype(a.dtype), **high)
    within = jnp.einsum("...ir,...is->...rs", a, a, **high)
    low = b.astype(jnp.float32)
    with_within = jnp.einsum("...rs,...so->...ro", within, low, **high)
    square = norm_squares + jnp.sum(low * (2 * scale * across + scale**2 * with_within), axis=-2)
    # A zero column has no direction; its outputs stay zero.
    return jnp.sqrt(jnp.maximum(square, jnp.finfo(jnp.float32).tiny))


def merge(
    adapter: LowRank, weight: jax.Array, a: jax.Array, b: jax.Array, m: jax.Array | None = None, path: str = ""
) -> jax.Array:
    """The weight with its adapter merged, in float32: `V = W + scale A B`, or `(m / |V|) V` with DoRA's magnitude.

    Args:
        adapter: Gives the scale.
        weight: `[..., in, out]`.
        a: `[..., in, rank]`.
        b: `[..., rank, out]`.
        m: `[..., out]`; None for LoRA.
        path: The path of the linear layer, for adapters with ranks or alphas per layer.
    """
    product = jnp.einsum("...ir,...ro->...io", a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    merged_weight = weight.astype(jnp.float32) + scale_at(adapter, path) * product
    if m is None:
        return merged_weight
    size = jnp.maximum(magnitude(merged_weight), jnp.finfo(jnp.float32).tiny)
    return merged_weight * (m.astype(jnp.float32) / size)[..., None, :]


def merged(adapter: LowRank, path: str, weight: jax.Array, leaf: Callable[[str], np.ndarray | jax.Array]) -> jax.Array:
    """The weight of a path with its adapter merged, float32.

    Args:
        adapter: Gives the scale.
        path: `layers.blocks.0.mlp.up.kernel`.
        weight: The weight without the adapter.
        leaf: Returns the adapter's arrays by path.
    """
    parts = (jnp.asarray(leaf(path + end)) for end in endings(adapter))
    return merge(adapter, weight, *parts, path=path_in_group(path).removesuffix(".kernel"))
