"""Run by test_logprobs.py in a process with eight CPU devices: a head cut over them against one device, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nnxdsl import Mesh
from nnxdsl.losses.lm_head import token_stats as logprobs
from nnxdsl.losses.lm_head.token_stats import ShardContext, token_stats
from nnxdsl.planning.collectives import collectives
from nnxdsl.sharding.layout import Layout
from nnxdsl.sharding.mesh import device_mesh

ROWS, LENGTH, WIDTH, VOCAB_SIZE = 8, 15, 32, 1280


def main() -> None:
    """Figures of a frozen and of a trained head: tiles do not divide the vocabulary, nor devices the length."""
    logprobs.CPU = logprobs.TileSizes(4 * 96 * WIDTH, 12)
    layout = Layout(Mesh(fsdp=2, context=2, tensor=2), {})
    mesh = device_mesh(layout.mesh, jax.devices(), "heads")
    shard_context = ShardContext("cpu", layout.constrain(mesh), layout.shard_counts, layout.length_shards)
    draw = np.random.default_rng(0)
    inputs: Any = (
        draw.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32),
        draw.standard_normal((VOCAB_SIZE, WIDTH)).astype(np.float32),
        draw.integers(0, VOCAB_SIZE, (ROWS, LENGTH)).astype(np.int32),
        draw.random((ROWS, LENGTH)) < 0.7,
        draw.standard_normal((2, ROWS, LENGTH)).astype(np.float32),
    )
    rows = PartitionSpec("fsdp")
    specs = rows, PartitionSpec("tensor", ("fsdp", "context")), rows, rows, PartitionSpec(None, "fsdp")
    places = tuple(NamedSharding(mesh, spec) for spec in specs)
    report: dict[str, Any] = {}
    for name, trained in (("frozen", 0), ("trained", (0, 1))):

        def run(
            shard_context: ShardContext | None, hidden: Any, head: Any, targets: Any, mask: Any, weight: Any, of: Any
        ) -> Any:
            def loss(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, Any]:
                stats = token_stats(hidden, head, targets, mask, None, 8.0, shard_context)
                return jnp.sum(stats.logp * weight[0] + jnp.square(stats.log_z) * weight[1]), stats

            return jax.grad(loss, argnums=of, has_aux=True)(hidden, head)

        alone = jax.jit(lambda *args, of=trained: run(None, *args, of))(*inputs)
        outside = (places[0] if name == "frozen" else places[:2]), None
        cut = jax.jit(
            lambda *args, of=trained: run(shard_context, *args, of), in_shardings=places, out_shardings=outside
        )
        compiled = cut.lower(*inputs).compile()
        result = compiled(*(jax.device_put(array, place) for array, place in zip(inputs, places, strict=True)))
        traffic = collectives(compiled.as_text() or "")
        report[name] = {
            "differences": jax.tree.leaves(
                jax.tree.map(lambda one, other: float(np.abs(np.asarray(one) - np.asarray(other)).max()), alone, result)
            ),
            "kinds": sorted({one.kind for one in traffic}),
            "in loops": sum(one.bytes for one in traffic if one.in_loop),
            "outside": sum(one.bytes for one in traffic if not one.in_loop),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
