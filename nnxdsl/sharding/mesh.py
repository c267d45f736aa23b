"""Device meshes: the devices of a slice are neighbours, slow links are crossed last."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.config.sharding import Mesh as MeshSpec
from nnxdsl.errors import PlanError, Problem
from nnxdsl.sharding.hardware import of_kind
from nnxdsl.sharding.rules import sizes

DEVICE_GIB = "NNXDSL_DEVICE_GIB"
"""Environment variable: the GiB that a program may use on each device, where JAX reports none or too many."""


def usable_memory(device: Any) -> int | None:
    """Bytes that a program may use on a device, attached or of a topology; None if unknown, as for CPUs.

    Raises:
        PlanError: `NNXDSL_DEVICE_GIB` is set to something else than a positive number.
    """
    if override := os.environ.get(DEVICE_GIB):
        try:
            gib = float(override)
        except ValueError:
            gib = math.nan
        if not 0 < gib < math.inf:
            raise PlanError(
                [Problem(DEVICE_GIB, f"expected a number of GiB above 0, got '{override}'")], "the environment"
            )
        return int(gib * 2**30)
    entry = of_kind(device.device_kind)
    if entry is not None:
        return entry.usable
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (jax.errors.JaxRuntimeError, NotImplementedError, AttributeError):  # a device of a topology
        return None


def device_mesh(spec: MeshSpec, devices: Sequence[Any], owner: str = "Mesh") -> Mesh:
    """The mesh over the first devices, attached ones or those of a topology; errors name its `owner`.

    Raises:
        PlanError: There are fewer devices, or fewer slices.
    """
    needed = spec.device_count
    if needed > len(devices):
        kind = devices[0].device_kind if devices else "none"
        shape = sizes(MESH_AXES, spec.sizes) or "a mesh of one"
        message = f"{shape} takes {needed} devices, there are {len(devices)} ({kind})"
        raise PlanError([Problem("mesh", message)], owner)
    if spec.slices == 1:
        return Mesh(_slice_grid(tuple(spec.sizes.values()), devices[:needed]), MESH_AXES)
    across = tuple(spec.across.get(axis, 1) for axis in MESH_AXES)
    inner = tuple(size // steps for size, steps in zip(spec.sizes.values(), across, strict=True))
    groups = _slices(devices, spec.slices, needed // spec.slices, owner)
    grid = np.stack([_slice_grid(inner, group) for group in groups]).reshape(*across, *inner)
    # Each axis steps within a slice first, then to the next slice.
    count = len(MESH_AXES)
    order = [axis for pair in zip(range(count), range(count, 2 * count), strict=True) for axis in pair]
    return Mesh(grid.transpose(order).reshape(tuple(spec.sizes.values())), MESH_AXES)


def own_device(mesh: Mesh, owner: str = "Mesh") -> Any:
    """A device of a mesh that belongs to this process; the first one of a topology.

    Raises:
        PlanError: A process has no device in the mesh.
    """
    first = mesh.devices.flat[0]
    if not isinstance(first, jax.Device) or jax.process_count() == 1:
        return first
    by_process = {device.process_index: device for device in mesh.devices.flat}
    if len(by_process) < jax.process_count():
        message = (
            f"a mesh of {mesh.size} devices has none of {jax.process_count() - len(by_process)} of the "
            f"{jax.process_count()} processes; use all {jax.device_count()} devices, or start fewer processes"
        )
        raise PlanError([Problem("mesh", message)], owner)
    return by_process[jax.process_index()]


def on_devices(values: Any, sharding: jax.sharding.Sharding) -> Any:
    """Host arrays on devices, transferred asynchronously.

    Args:
        values: A tree of numpy arrays of one shape in all processes; each transfers the shards of its own devices.
        sharding: Of every array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)

    def part(value: Any) -> jax.Array:
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(part, values)


def _slice_grid(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Devices of one slice; neighbours in the mesh are neighbours in a TPU's torus."""
    if devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices, dtype=object).reshape(shape)


def _slices(devices: Sequence[Any], slices: int, size: int, owner: str) -> list[list[Any]]:
    """Devices by slice: by a TPU's `slice_index`, else by process, else consecutive devices in equal parts."""
    groups: dict[Any, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "slice_index", device.process_index), []).append(device)
    if len(groups) == 1:
        return [list(devices[start : start + size]) for start in range(0, slices * size, size)]
    whole = [group[:size] for group in groups.values() if len(group) >= size]
    if len(whole) < slices:
        lengths = ", ".join(str(len(group)) for group in groups.values())
        message = f"the mesh needs {slices} slices of {size} devices, there are slices of {lengths}"
        raise PlanError([Problem("mesh.slices", message)], owner)
    return whole[:slices]
