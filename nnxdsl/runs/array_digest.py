"""A digest of arrays, computed on their devices: checks that frozen weights are the same after a resume."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

_PRIMES = (2654435761, 2246822519, 3266489917, 668265263, 374761393)
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(leaves: Mapping[str, jax.Array]) -> str:
    """SHA-256 (64 hex digits) over names, shapes, dtypes and bits of arrays; the same on every mesh.

    Each array is reduced to 32 bits on its devices, in one pass and without gathering it. A change of one value always
    changes the digest; a change of many at once, nearly always.
    """
    hashed = hashlib.sha256()
    sums = jax.device_get(_bit_sums(dict(leaves)))
    for path in sorted(sums):
        hashed.update(f"{path} {leaves[path].dtype} {leaves[path].shape} {int(sums[path])}\n".encode())
    return hashed.hexdigest()


@jax.jit
def _bit_sums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: _bit_sum(leaf) for path, leaf in leaves.items()}


def _bit_sum(leaf: jax.Array) -> jax.Array:
    """The sum modulo 2**32 of the bits of all values, each hashed with its index.

    The hash is the finalizer of murmur3 (Appleby 2011), a bijection: any change of one value changes the sum, and equal
    changes of many values, such as a factor of two, do not cancel.
    """
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jax.lax.bitcast_convert_type(leaf, _UINTS[leaf.dtype.itemsize])
    # By axis, so that each device can compute the indices of its shard.
    indices = [jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) for axis in range(leaf.ndim)]
    offsets = (index * jnp.uint32(prime) for index, prime in zip(indices, _PRIMES, strict=False))
    bits = leaf.astype(jnp.uint32) + sum(offsets, jnp.zeros(leaf.shape, jnp.uint32))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return jnp.sum(bits ^ (bits >> 16), dtype=jnp.uint32)
