"""How long rows times the matrix of their group take: our products, XLA's for any platform, and simpler ones.

`python benchmarks/grouped_matmul.py` prints milliseconds, the best of several calls, of a product alone and of one with
the gradients of both sides: in `nnxdsl.models.moe.grouped_matmul`, by `jax.lax.ragged_dot`, of all tokens with all
matrices (nothing is sorted or skipped), and of as many rows with a single matrix, which is the least there could be.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.models.moe.grouped_matmul import grouped_dot

SHAPES = ((4, 2, 512, 128, 256), (8, 2, 1024, 256, 512), (32, 4, 1024, 256, 256), (64, 8, 1024, 256, 128))
"""Groups, slots of a token, tokens, inputs, outputs."""


def best(function: Callable[..., Any], *inputs: jax.Array, calls: int) -> float:
    """Milliseconds of the quickest call, after one that compiles."""
    run, times = jax.jit(function), []
    jax.block_until_ready(run(*inputs))
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def measure(groups: int, slots: int, tokens: int, inputs: int, outputs: int, calls: int) -> dict[str, list[float]]:
    """By the way it is computed: milliseconds of the product, and of it with its gradients."""
    rng, rows = np.random.default_rng(0), tokens * slots
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((rows, inputs), (groups, inputs, outputs)))
    group = np.sort(rng.integers(0, groups, rows)).astype(np.int32)
    sizes = jnp.asarray(np.bincount(group, minlength=groups), jnp.int32)
    shaped = jnp.asarray(group).reshape(1, tokens, slots)
    ways: dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], jax.Array, jax.Array]] = {
        "ours": (lambda x, k: grouped_dot(x.reshape(1, tokens, slots, inputs), k, shaped), x, kernel),
        "ragged_dot": (lambda x, k: jax.lax.ragged_dot(x, k, sizes), x, kernel),
        "all": (lambda x, k: jnp.einsum("ti,gio->gto", x, k), x[:tokens], kernel),
        "one": (jnp.dot, x, kernel[0]),
    }

    def both(product: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda x, k: jnp.sum(jnp.square(product(x, k))), (0, 1))

    return {
        name: [round(best(f, *values, calls=calls), 2) for f in (product, both(product))]
        for name, (product, *values) in ways.items()
    }


def main() -> None:
    """Prints a line of JSON for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=7)
    calls = parser.parse_args().calls
    for shape in SHAPES:
        names = ("groups", "slots", "tokens", "inputs", "outputs")
        print(json.dumps(dict(zip(names, shape, strict=True)) | measure(*shape, calls)), flush=True)


if __name__ == "__main__":
    main()
