"""Run by test_replay_objectives.py: ten steps with every objective by programs in float64, as JSON.

The programs are those of nnxdsl with another number format: wherever their source says float32, they have float64. So
what is left between them and the replay is no rounding.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
_narrow, _uniform = jnp.float32, jax.random.uniform


def _dtype(name: Any) -> np.dtype:
    return np.dtype("float64" if np.dtype(name) == np.dtype("float32") else name)


def _uniform_array(key: jax.Array, shape: tuple[int, ...], dtype: Any, low: float, high: float) -> jax.Array:
    """The same numbers as float32 has."""
    low, high = np.float32(low), np.float32(high)
    return _uniform(key, shape, _narrow, low, high).astype(dtype)


jnp.float32, jnp.dtype, jax.random.uniform = jnp.float64, _dtype, _uniform_array

from small_lab.replays import REPLAY, steps  # noqa: E402


def main() -> None:
    """The figures of all cases, or of those that are named."""
    stored, result = json.loads((REPLAY / "objectives.json").read_text()), {}
    for name in sys.argv[1:] or stored:
        result[name] = steps(stored[name])
        print(name, result[name][-1]["loss"], file=sys.stderr, flush=True)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
