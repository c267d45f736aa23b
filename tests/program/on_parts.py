"""Places an array on eight devices, of which four each have the same half; prints how often it was read."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.formats.mapped_arrays import MappedArray
from nnxdsl.program.init import place

reads: list[int] = []
array = np.arange(24, dtype=np.float32).reshape(4, 6)


def read() -> np.ndarray:
    reads.append(1)
    return array


mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "fsdp"))
where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))
placed = place(MappedArray((4, 6), array.dtype, (read,), 0), jnp.float32, where)
json.dump({"reads": len(reads), "equal": bool(np.array_equal(placed, array))}, sys.stdout)
