"""What low-rank adapters are made of: their leaves, first values, norms and merged weights. Knows no module."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.adapter import Adapter, DoRA, LowRank, scale_at
from nnxdsl.models.params import path_in_group

A, B, M = "_lora_a", "_lora_b", "_lora_m"
"""What a weight's path is followed by in those of its adapter: two thin matrices, and DoRA's magnitude."""


def is_adapter(path: str) -> bool:
    """Whether a path is an adapter's."""
    return path.endswith((A, B, M))


def kernel_of(path: str) -> str:
    """The path of the weight that an adapter's leaf belongs to."""
    return path.rpartition("_lora_")[0]


def endings(adapter: LowRank) -> tuple[str, ...]:
    """What an adapter has beside each weight."""
    return (A, B, M) if isinstance(adapter, DoRA) else (A, B)


def disable_adapter(
    leaves: Mapping[str, jax.Array], start: Mapping[str, jax.Array] | None = None
) -> dict[str, jax.Array]:
    """The same leaves with an adapter as it was before any step.

    Args:
        leaves: The policy's.
        start: What cannot be said without it, see `needs_initial_copy`;
            the rest of a new adapter adds nothing to its base.
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
    """Whether what a reference is cannot be said without an adapter's first value at a path.

    Of a new LoRA nothing is needed, since B is zero; of a new DoRA its magnitudes, which are the norms of the base, but
    rounded once; of an adapter that another one began, all of it.
    """
    if not isinstance(adapter, LowRank) or not is_adapter(path):
        return False
    return adapter.start is not None or path.endswith(M)


def initial(path: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """First value of A or B, float32: A is He-uniform over its inputs (He et al. 2015), B is zero."""
    if path.endswith(B):
        return jnp.zeros(shape, jnp.float32)
    bound = (6.0 / shape[-2]) ** 0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def magnitude(weight: jax.Array) -> jax.Array:
    """First value of DoRA's m: the norm of a weight `[..., in, out]` over its inputs, `[..., out]` float32."""
    return jnp.sqrt(jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-2))


def norm(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """The norm over inputs of `W + scale A B`, without that weight ever being there.

    `|w + s A b|^2 = |w|^2 + 2 s b . (A^T w) + s^2 b . (A^T A) b`, of each output's w and b.

    Args:
        weight: `[..., in, out]`.
        a: `[..., in, rank]`.
        b: `[..., rank, out]`.
        scale: of the product.

    Returns:
        `[..., out]` float32.
    """
    high: dict = {"precision": "highest", "preferred_element_type": jnp.float32}
    own = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-2)
    across = jnp.einsum("...ir,...io->...ro", a, weight.astype(a.dtype), **high)
    within = jnp.einsum("...ir,...is->...rs", a, a, **high)
    low = b.astype(jnp.float32)
    with_within = jnp.einsum("...rs,...so->...ro", within, low, **high)
    square = own + jnp.sum(low * (2 * scale * across + scale**2 * with_within), axis=-2)
    # A weight of nothing but zeros has no direction; its outputs stay zero.
    return jnp.sqrt(jnp.maximum(square, jnp.finfo(jnp.float32).tiny))


def merge(
    adapter: LowRank, weight: jax.Array, a: jax.Array, b: jax.Array, m: jax.Array | None = None, path: str = ""
) -> jax.Array:
    """The weight with its adapter in it, in float32: `V = W + scale A B`, or `(m / |V|) V` with DoRA's magnitude.

    Args:
        adapter: Gives the scale.
        weight: `[..., in, out]`.
        a: `[..., in, rank]`.
        b: `[..., rank, out]`.
        m: `[..., out]`; None for LoRA.
        path: Of the linear layer, where the adapter has other ranks or alphas for some.
    """
    product = jnp.einsum("...ir,...ro->...io", a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    whole = weight.astype(jnp.float32) + scale_at(adapter, path) * product
    if m is None:
        return whole
    size = jnp.maximum(magnitude(whole), jnp.finfo(jnp.float32).tiny)
    return whole * (m.astype(jnp.float32) / size)[..., None, :]


def merged(adapter: LowRank, path: str, weight: jax.Array, leaf: Callable[[str], np.ndarray | jax.Array]) -> jax.Array:
    """The weight of a path with its adapter in it, float32.

    Args:
        adapter: Gives the scale.
        path: `layers.blocks.0.mlp.up.kernel`.
        weight: What is there without the adapter.
        leaf: Gives the adapter's arrays by path.
    """
    parts = (jnp.asarray(leaf(path + end)) for end in endings(adapter))
    return merge(adapter, weight, *parts, path=path_in_group(path).removesuffix(".kernel"))
