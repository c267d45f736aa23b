"""What arrays hold, as one short text: to see that frozen weights are the same after a resume."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

_PRIMES = (2654435761, 2246822519, 3266489917, 668265263, 374761393)
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(leaves: Mapping[str, jax.Array]) -> str:
    """64 hex digits over names, shapes, dtypes and bits of arrays; the same on every mesh.

    Each array is summed up on its devices, in one pass and with nothing gathered: billions of weights cost no more than
    reading them once. A change of one value is always seen; of many at once, nearly always (32 bits for each array).
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
    """The sum modulo 2**32 over all values of their bits, each mixed with its place.

    The mixing is murmur3's last step (Appleby 2011), which takes no two words to one: that a value changes shows, and
    that many change alike, by a factor of two say, does not cancel.
    """
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jax.lax.bitcast_convert_type(leaf, _WORDS[leaf.dtype.itemsize])
    # By axis, so that each device can number its own part.
    numbers = [jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) for axis in range(leaf.ndim)]
    places = (number * jnp.uint32(prime) for number, prime in zip(numbers, _PRIMES, strict=False))
    word = leaf.astype(jnp.uint32) + sum(places, jnp.zeros(leaf.shape, jnp.uint32))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * jnp.uint32(factor)
    return jnp.sum(word ^ (word >> 16), dtype=jnp.uint32)
