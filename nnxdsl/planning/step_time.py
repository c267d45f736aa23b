"""Estimated time of a step: FLOPs, bytes and transfers from shapes alone, over a device's published speeds.

The estimates rank meshes and do not predict measured times: products run at `EFFICIENCY` of the peak, and `HIDDEN` of
the transfers overlap with them.
"""

from __future__ import annotations

import math

import attrs

from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.models.pipeline import idle_share
from nnxdsl.models.remat import AGAIN
from nnxdsl.planning import flops
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.forward import parts_in_stages
from nnxdsl.sharding.hardware import Device
from nnxdsl.sharding.rules import pieces

EFFICIENCY = 0.5
"""Share of peak FLOP/s that large matrix products reach."""

HIDDEN = 0.5
"""Share of the transfers that overlap with products."""


@attrs.frozen
class Work:
    """The work of one step on one device.

    Attributes:
        flops: FLOPs of matrix products, recomputed ones included.
        memory_bytes: Bytes read from and written to device memory.
        link_bytes: Bytes sent, by mesh axis.
    """

    flops: float
    memory_bytes: float
    link_bytes: dict[str, float]


@attrs.frozen
class Cost:
    """Seconds of one step.

    Attributes:
        compute: For products at `EFFICIENCY` of the peak.
        memory: For device memory at its bandwidth.
        links: For transfers at the speeds of the links of their axes.
        step: The larger of `compute` and `memory`, plus the part of `links` that does not overlap.
    """

    compute: float
    memory: float
    links: float
    step: float


def work(blueprint: Blueprint) -> Work:
    """The work of one device in one step of the longest rows."""
    longest = blueprint.longest
    experiment, config, layout = blueprint.experiment, blueprint.config, blueprint.layout
    sizes = layout.mesh.sizes
    rows, times = blueprint.rows_at_once, experiment.microbatches
    batch, context = layout.batch_shards(rows), sizes["context"]
    (mlp_axes,) = layout.resolve(("activation_mlp",), (config.mlp.dim,)).spec
    tensor = pieces(mlp_axes, sizes)
    again, _ = AGAIN[blueprint.remat]
    runs_reference = blueprint.reference.is_online

    counts = flops.weights(blueprint)
    layers, head = flops.executed(blueprint, rows * times, longest, runs_reference=runs_reference)
    # A stage has a part of the layers, and is idle while the pipeline fills and drains.
    parts = parts_in_stages(layout.stages, max(rows // batch, 1))
    products = layers / (layout.stages * (1 - idle_share(layout.stages, parts))) + head

    device_rows = rows / batch / context  # of a micro-batch, in units of whole rows
    size = blueprint.compute.itemsize
    activation = device_rows * longest.trunk * config.embed_dim * size
    layers_run = config.layers.num_layers + len(blueprint.mtp_layer_kinds)
    weights = (counts.trunk / layout.stages + counts.head) * size / tensor
    sweeps = (2 + again + runs_reference + experiment.compares_parts) * times
    traffic = weights * sweeps + 12 * activation * layers_run * sweeps
    traffic += sum(layout.device_bytes().get(part, 0) for part in ("trainable", "optimizer")) * 2
    gathered = layout.gathered_from
    trained = sum(math.prod(leaf.shape) for leaf in blueprint.trainable.values()) * size / tensor
    gradients = 2 * trained / gathered * times
    if experiment.outer is not None and layout.workers_per_device < layout.workers:
        # DiLoCo sends float32 weights, once every few steps.
        gradients = 2 * trained / gathered * 4 / size / experiment.outer.every_steps
    links = {
        "fsdp": (weights * sweeps + trained * times) * (1 - 1 / gathered),
        "data": gradients * (1 - 1 / sizes["data"]),
        "tensor": 4 * activation * layers_run * sweeps * (1 - 1 / tensor),
        "context": 2 * device_rows * context * longest.trunk * config.num_kv_heads * config.head_dim * size / tensor
        * layers_run * sweeps * (1 - 1 / context),
    }  # fmt: skip
    return Work(products / (batch * context * tensor), traffic, links)


def cost(blueprint: Blueprint, device: Device) -> Cost:
    """Seconds of one step of the longest rows, on devices with published speeds."""
    step = work(blueprint)
    assert device.flops
    assert device.bandwidth
    compute, memory = step.flops / (device.flops * EFFICIENCY), step.memory_bytes / device.bandwidth
    links = sum(count / _speed(blueprint, axis, device) for axis, count in step.link_bytes.items() if count)
    return Cost(compute, memory, links, max(compute, memory) + (1 - HIDDEN) * links)


def _speed(blueprint: Blueprint, axis: str, device: Device) -> float:
    """Bytes/s along a mesh axis: those of `link` if the axis stays within a fast domain, else of `slow_link`."""
    mesh = blueprint.layout.mesh
    faster = MESH_AXES[MESH_AXES.index(axis) :]
    span = math.prod(mesh.sizes[name] for name in faster)
    assert device.link
    assert device.slow_link
    return device.link if span <= device.domain and mesh.across.get(axis, 1) == 1 else device.slow_link
