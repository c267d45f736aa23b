"""How long a step should take: products, bytes and transfers from shapes alone, over a device's published speeds.

The figures rank meshes; they do not foretell a clock. Products are taken at `EFFICIENCY` of the peak, half of the
transfers are taken to hide behind them.
"""

from __future__ import annotations

import math

import attrs

from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.models.pipeline import idle_share
from nnxdsl.models.remat import AGAIN
from nnxdsl.planning import flops
from nnxdsl.program.batches import Lengths
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.forward import parts_in_stages
from nnxdsl.sharding.hardware import Device
from nnxdsl.sharding.rules import pieces

EFFICIENCY = 0.5
"""Share of the peak that large matrix products reach."""

HIDDEN = 0.5
"""Share of the transfers that is over before the products beside them are."""


@attrs.frozen
class Work:
    """Of one step on one device.

    Attributes:
        flops: Products that are computed, those that are computed again among them.
        memory_bytes: Read from and written to the device's own memory.
        link_bytes: Sent over the mesh axes, by axis.
    """

    flops: float
    memory_bytes: float
    link_bytes: dict[str, float]


@attrs.frozen
class Cost:
    """Seconds of one step.

    Attributes:
        compute: Products at `EFFICIENCY` of the peak.
        memory: The device's own memory at its bandwidth.
        links: Transfers at the speeds of the links that their axes run over.
        step: The larger of the first two, and what is not hidden of the third.
    """

    compute: float
    memory: float
    links: float
    step: float


def work(blueprint: Blueprint, longest: Lengths) -> Work:
    """What one device does in one step."""
    experiment, config, layout = blueprint.experiment, blueprint.config, blueprint.layout
    sizes = layout.mesh.sizes
    rows, times = experiment.rows_at_once, experiment.microbatches
    batch, tokens_cut = layout.batch_shards(rows), sizes["context"]
    (wide,) = layout.resolve(("activation_mlp",), (config.mlp_dim,)).spec
    tensor = pieces(wide, sizes)
    again, _ = AGAIN[blueprint.remat]
    compared = blueprint.reference.is_online

    of = flops.weights(blueprint)
    layers, head = flops.executed(blueprint, experiment.batch_size, longest, compared=compared)
    # A stage has a part of the layers, and waits while the pipeline fills and runs dry.
    parts = parts_in_stages(layout.stages, max(rows // batch, 1))
    products = layers / (layout.stages * (1 - idle_share(layout.stages, parts))) + head

    here = rows / batch / tokens_cut  # rows of a micro-batch on one device, as if whole ones
    size = blueprint.compute.itemsize
    activation = here * longest.trunk * config.embed_dim * size
    layers_run = config.num_layers + len(blueprint.mtp_layer_kinds)
    weights = (of.trunk / layout.stages + of.head) * size / tensor
    sweeps = (2 + again + compared + experiment.compares_parts) * times
    moved = weights * sweeps + 12 * activation * layers_run * sweeps
    moved += sum(layout.device_bytes().get(part, 0) for part in ("trainable", "optimizer")) * 2
    spread = layout.gathered_from
    trained = sum(math.prod(leaf.shape) for leaf in blueprint.trainable.values()) * size / tensor
    gradients = 2 * trained / spread * times
    if experiment.outer is not None and layout.workers_here < layout.workers:  # float32 weights, once in many steps
        gradients = 2 * trained / spread * 4 / size / experiment.outer.every_steps
    links = {
        "fsdp": (weights * sweeps + trained * times) * (1 - 1 / spread),
        "data": gradients * (1 - 1 / sizes["data"]),
        "tensor": 4 * activation * layers_run * sweeps * (1 - 1 / tensor),
        "context": 2 * here * tokens_cut * longest.trunk * config.num_kv_heads * config.head_dim * size / tensor
        * layers_run * sweeps * (1 - 1 / tokens_cut),
    }  # fmt: skip
    return Work(products / (batch * tokens_cut * tensor), moved, links)


def cost(blueprint: Blueprint, longest: Lengths, device: Device) -> Cost:
    """Seconds of one step on devices of one kind.

    Args:
        blueprint: The program without devices.
        longest: The longest rows of its data.
        device: With published speeds.
    """
    done = work(blueprint, longest)
    assert device.flops
    assert device.bandwidth
    compute, memory = done.flops / (device.flops * EFFICIENCY), done.memory_bytes / device.bandwidth
    links = sum(count / _speed(blueprint, axis, device) for axis, count in done.link_bytes.items() if count)
    return Cost(compute, memory, links, max(compute, memory) + (1 - HIDDEN) * links)


def _speed(blueprint: Blueprint, axis: str, device: Device) -> float:
    """Bytes a second along a mesh axis: fast if all devices that differ in it lie in one fast domain."""
    mesh = blueprint.layout.mesh
    faster = MESH_AXES[MESH_AXES.index(axis) :]
    span = math.prod(mesh.sizes[name] for name in faster)
    assert device.link
    assert device.slow_link
    return device.link if span <= device.domain and mesh.across.get(axis, 1) == 1 else device.slow_link
