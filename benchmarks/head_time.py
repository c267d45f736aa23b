"""How long log-probabilities and their gradient take: checkpointed chunks of tokens against nnxdsl, on this machine.

`python benchmarks/head_time.py` takes about three minutes on two cores. Both sides take turns, one call each; the ratio
of the minima stands first, theirs over ours. Both give the same log-probabilities, entropies and gradients, which is
checked before anything is timed.

The baseline is what many trainers do, and nnxdsl did before: `jax.lax.scan` over chunks of tokens whose body is
`jax.checkpoint`ed, so that the logits of one chunk exist at one time, and are computed again in the backward pass.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.losses.lm_head.token_stats import token_stats

VOCAB_SIZE, WIDTH, LENGTHS = 32_768, 640, (512, 1024)
CHUNK = 64
"""Tokens of a chunk of the baseline: it was quickest of 32, 64, 128, 256 and 512."""

ROW = "{:<8} {:>6} {:>7} {:>13} {:>13} {:>13} {:>13}"
HEADINGS = ("head", "tokens", "ratio", "theirs min ms", "median ms", "ours min ms", "median ms")


def chunks(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies `[N]` of targets `[N]`, from hidden states `[N, D]` and a head `[V, D]`."""

    @jax.checkpoint
    def one(head: jax.Array, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("cd,vd->cv", hidden, head, preferred_element_type=jnp.float32)
        log_p = jax.nn.log_softmax(logits)
        still = jax.lax.stop_gradient(log_p)
        return jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(still) * still, axis=1)

    def body(head: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        return head, one(head, *inputs)

    count = len(targets) // CHUNK
    _, result = jax.lax.scan(body, head, (hidden.reshape(count, CHUNK, -1), targets.reshape(count, CHUNK)))
    return result[0].reshape(-1), result[1].reshape(-1)


def ours(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of nnxdsl."""
    stats = token_stats(hidden[None], head, targets[None], jnp.ones((1, len(targets)), bool))
    return stats.logp[0], stats.entropy[0]


def differentiated(run: Callable[..., tuple[jax.Array, jax.Array]], trained: bool) -> Callable[..., Any]:
    """From hidden states, head, targets and weights to the gradient of a weighted sum, with all that `run` says."""

    def loss(hidden: jax.Array, head: jax.Array, targets: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
        logp, entropy = run(hidden, head, targets)
        return jnp.sum(logp * weight), (logp, entropy)

    return jax.grad(loss, argnums=(0, 1) if trained else 0, has_aux=True)


def compare(tokens: int, trained: bool, turns: int) -> None:
    """Print one row."""
    draw = np.random.default_rng(0)
    inputs = (
        jnp.asarray(draw.standard_normal((tokens, WIDTH)), jnp.float32),
        jnp.asarray(0.1 * draw.standard_normal((VOCAB_SIZE, WIDTH)), jnp.float32),
        jnp.asarray(draw.integers(0, VOCAB_SIZE, tokens), jnp.int32),
        jnp.asarray(draw.standard_normal(tokens), jnp.float32),
    )
    sides = [jax.jit(differentiated(run, trained)).lower(*inputs).compile() for run in (chunks, ours)]
    one, other = (jax.tree.leaves(side(*inputs)) for side in sides)
    for theirs, mine in zip(one, other, strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=0, atol=3e-5)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for side, taken in zip(sides, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(side(*inputs))
            taken.append(time.perf_counter() - start)
    figures = [f"{1000 * of(taken):.1f}" for taken in seconds for of in (min, statistics.median)]
    ratio = min(seconds[0]) / min(seconds[1])
    print(ROW.format("trained" if trained else "frozen", tokens, f"{ratio:.2f}", *figures), flush=True)


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="calls of each side (default: 12)")
    options = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    print(f"python {platform.python_version()}, {versions}, {os.cpu_count()} cores, {jax.default_backend()}")
    print(f"{VOCAB_SIZE} words, width {WIDTH}, float32; forward and backward")
    print(ROW.format(*HEADINGS))
    for trained in (False, True):
        for tokens in LENGTHS:
            compare(tokens, trained, options.turns)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
