"""What log-probabilities and their gradient take of memory beside what they are given, as XLA compiles them.

`python benchmarks/head_memory.py` compiles for an H200 that is not there, where the compiler for CUDA is installed
(`docs/guides/plan.md` says how), else for this machine's CPU, and says which. The naive side is `jax.nn.log_softmax` of
all logits. The ratio stands first: naive over ours. Ends with exit code 1 if ours takes more than `AT_MOST` with a
frozen head on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from nnxdsl.errors import RunError
from nnxdsl.losses.lm_head.token_stats import ShardContext, token_stats
from nnxdsl.planning.aot_process import find_compiler
from nnxdsl.sharding import hardware

VOCAB_SIZE, WIDTH, LENGTHS, DTYPE = 262_144, 640, (1024, 16_384), "bfloat16"
AT_MOST = 128 * 2**20
ROW = "{:<8} {:>7} {:>7} {:>10} {:>10}"
HEADINGS = ("head", "tokens", "ratio", "naive MiB", "ours MiB")


def temporaries(run: Any, tokens: int, trained: bool, place: Any) -> int:
    """Bytes that the gradient of a weighted sum of log-probabilities takes, beside what it is given and gives."""

    def gradient(hidden: Any, head: Any, targets: Any, weight: Any) -> Any:
        def loss(hidden: Any, head: Any) -> Any:
            return jnp.sum(run(hidden, head, targets) * weight)

        return jax.grad(loss, argnums=(0, 1) if trained else 0)(hidden, head)

    shapes = ((1, tokens, WIDTH), DTYPE), ((VOCAB_SIZE, WIDTH), DTYPE), ((1, tokens), "int32"), ((1, tokens), "float32")
    inputs = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
    report = jax.jit(gradient).lower(*inputs).compile().memory_analysis()
    assert report is not None
    return report.temp_size_in_bytes


def naive(hidden: Any, head: Any, targets: Any) -> Any:
    """Log-probabilities `[1, N]` of targets, from all logits."""
    logits = jnp.einsum("bnd,vd->bnv", hidden, head, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def table(device: Any, kind: str) -> int:
    """Print the table; 1 if ours takes too much."""

    def ours(hidden: Any, head: Any, targets: Any) -> Any:
        return token_stats(hidden, head, targets, jnp.ones(targets.shape, bool), shard_context=ShardContext(kind)).logp

    failed = False
    place = jax.sharding.SingleDeviceSharding(device)
    print(ROW.format(*HEADINGS))
    for trained in (False, True):
        for tokens in LENGTHS:
            theirs, mine = (temporaries(run, tokens, trained, place) for run in (naive, ours))
            failed |= kind == "gpu" and not trained and mine > AT_MOST
            text = "trained" if trained else "frozen", tokens, f"{theirs / mine:.1f}"
            print(ROW.format(*text, f"{theirs / 2**20:.1f}", f"{mine / 2**20:.1f}"), flush=True)
    return int(failed)


def main() -> int:
    """The table of the best judge that there is."""
    jax.config.update("jax_platforms", "cpu")
    try:
        compiler = find_compiler("gpu")
    except RunError as error:
        print(f"for this machine's CPU, which computes bfloat16 in float32: {error}")
        compiler = None
    else:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
        sys.path += [] if compiler.directory is None else [str(compiler.directory)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    print(f"python {platform.python_version()}, {versions}; {VOCAB_SIZE} words, width {WIDTH}, {DTYPE}")
    if compiler is None:
        return table(jax.devices()[0], "cpu")
    kind = hardware.device("h200")
    described = topologies.get_topology_desc(platform="cuda", target_config=kind.target, topology=kind.topology(1))
    print(f"for {kind.description}, which need not be there")
    return table(described.devices[0], "gpu")


if __name__ == "__main__":
    sys.exit(main())
