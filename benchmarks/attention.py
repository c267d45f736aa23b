"""Times and memory of one layer's attention on this machine, forward and backward: one dense product against blocks.

`python benchmarks/attention.py [--tokens 512 1024] [--heads 4] [--kv-heads 1] [--width 64] [--window 512]`

Rows are pairs, half of them prompt, filled at random between a half and all. Both sides run by turns; shown are the
least times, and the temporary memory of each compiled program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.data.batch import PairBatch
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.blockwise import attend_in_blocks
from nnxdsl.models.attention.dot_product import dot_product_attention
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.program.batches.pairs import pair_positions


def places_of(batch: int, prompt: int, response: int, rng: np.random.Generator) -> TokenPositions:
    """Places of pairs whose parts are filled at random."""
    parts = (prompt, response, response)
    lengths: Any = [jnp.asarray(rng.integers(size // 2, size + 1, batch), jnp.int32) for size in parts]
    tokens: Any = [jnp.zeros((batch, size), jnp.int32) for size in parts]
    return pair_positions(PairBatch(*(*tokens, *lengths, jnp.ones(batch))))


def compared(tokens: int, batch: int, heads: int, kv_heads: int, width: int, window: int | None, turns: int) -> None:
    """One line of the table."""
    rng = np.random.default_rng(0)
    row = rows.pair(tokens // 2, tokens // 4)
    places = places_of(batch, tokens // 2, tokens // 4, rng)
    query, key, value = (
        jnp.asarray(rng.normal(size=(batch, tokens, n, width)), jnp.float32) for n in (heads, kv_heads, kv_heads)
    )
    scale = width**-0.5
    kernels: dict[str, Callable[..., jax.Array]] = {
        "dense": lambda q, k, v, p: dot_product_attention(q, k, v, attention_mask(p, p, window), scale),
        "chunked": lambda q, k, v, p: attend_in_blocks(q, k, v, p, row, window=window, scale=scale),
    }

    def step(kernel: Callable[..., jax.Array]) -> Any:
        def total(query: jax.Array, key: jax.Array, value: jax.Array, places: TokenPositions) -> jax.Array:
            return jnp.sum(
                jnp.where(places.segment_ids[:, :, None, None] > 0, kernel(query, key, value, places), 0) ** 2
            )

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))

    compiled = {name: step(kernel).lower(query, key, value, places).compile() for name, kernel in kernels.items()}
    least = dict.fromkeys(compiled, float("inf"))
    for _ in range(turns):
        for name, run in compiled.items():
            started = time.perf_counter()
            jax.block_until_ready(run(query, key, value, places))
            least[name] = min(least[name], time.perf_counter() - started)
    spaces = [run.memory_analysis().temp_size_in_bytes / 2**20 for run in compiled.values()]
    times = " ".join(f"{seconds * 1e3:9.1f}" for seconds in least.values())
    memory = " ".join(f"{space:8.1f}" for space in spaces)
    ratio = least["dense"] / least["chunked"]
    print(f"{tokens:6d} {batch:3d}  {heads}/{kv_heads} {width:4d}  {ratio:5.2f}  {times} ms  {memory} MiB", flush=True)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--window", type=int)
    parser.add_argument("--turns", type=int, default=10)
    asked = parser.parse_args()
    print("tokens  rows heads width  dense/chunked  dense  chunked (least)  temporaries")
    for tokens in asked.tokens:
        batch = max(1, min(4, 4096 // tokens))
        compared(tokens, batch, asked.heads, asked.kv_heads, asked.width, asked.window, asked.turns)


if __name__ == "__main__":
    main()
