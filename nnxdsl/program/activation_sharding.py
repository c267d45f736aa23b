"""The shardings of a step's activations, from their logical axes, found by tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
from jax.sharding import PartitionSpec

from nnxdsl.program.attention_kernel import Kernels
from nnxdsl.program.batches.abstract import abstract_batch
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.forward import Forward, ForwardSharding
from nnxdsl.sharding.rules import Axes, pieces


@attrs.frozen
class Flow:
    """One kind of activation of the network.

    Attributes:
        axes: Names of its dimensions.
        shape: Global shape, of one micro-batch.
        spec: Its partition spec.
        device_shape: Shape on one device.
    """

    axes: Axes
    shape: tuple[int, ...]
    spec: PartitionSpec
    device_shape: tuple[int, ...]


def flows(blueprint: Blueprint) -> list[Flow]:
    """All kinds of activations with logical axes; empty for data of unknown lengths."""
    experiment, layout = blueprint.experiment, blueprint.layout
    if not blueprint.longest.trunk:
        return []
    kinds: dict[tuple[Axes, tuple[int, ...]], Flow] = {}

    def record(x: jax.Array, axes: Axes) -> jax.Array:
        spec = layout.resolve(axes, x.shape).spec
        device_shape = tuple(
            size // pieces(target, layout.mesh.sizes) for size, target in zip(x.shape, spec, strict=True)
        )
        kinds.setdefault((axes, x.shape), Flow(axes, x.shape, spec, device_shape))
        return x

    forward = Forward(
        blueprint.compute,
        blueprint.remat,
        experiment.memory.logprob_tokens,
        Kernels(blueprint.config),
        sharding=ForwardSharding(
            record, shard_counts=layout.shard_counts, length_multiple=layout.length_shards, platform=blueprint.platform
        ),
        head=blueprint.head,
    )
    blocks = layout.batch_shards(experiment.rows_at_once)
    batch = abstract_batch(
        experiment.data,
        blueprint.rows_at_once,
        batching=experiment.batching,
        blocks=blocks,
        num_generations=blueprint.num_generations,
    )
    leaves = {p: jax.ShapeDtypeStruct(leaf.shape, blueprint.compute) for p, leaf in blueprint.base.items()}

    def trace(leaves: dict[str, Any], batch: Any) -> Any:
        decoder = forward.model(blueprint.base_template, leaves)
        return forward.read(decoder, batch)

    jax.eval_shape(trace, leaves, batch)
    return list(kinds.values())


OnSharding = Callable[[Axes, tuple[int, ...], Any], None]
"""Called with the logical axes, the shape, and the sharding that the compiler chose."""


def report_shardings(
    constrain: Callable[[jax.Array, Axes], jax.Array], on_sharding: OnSharding
) -> Callable[[jax.Array, Axes], jax.Array]:
    """A constraint that also reports the sharding that the compiler chose for the activation."""

    def constrain_and_report(x: jax.Array, axes: Axes) -> jax.Array:
        x = constrain(x, axes)
        jax.debug.inspect_array_sharding(x, callback=lambda sharding: on_sharding(axes, x.shape, sharding))
        return x

    return constrain_and_report
