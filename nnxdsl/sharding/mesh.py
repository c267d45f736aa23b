"""Which device stands where in a mesh: fast links inside, slow ones across slices."""

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

MEMORY = "NNXDSL_DEVICE_GIB"
"""The variable that says how many GiB a program may take on each device: less than there are, or where nobody knows."""


def usable_memory(device: Any) -> int | None:
    """Bytes that a program may take on a device, real or of a topology; None where nobody knows, as on CPUs.

    Raises:
        PlanError: `NNXDSL_DEVICE_GIB` is set, and is no number of GiB.
    """
    if override := os.environ.get(MEMORY):
        try:
            gib = float(override)
        except ValueError:
            gib = math.nan
        if not 0 < gib < math.inf:
            raise PlanError([Problem(MEMORY, f"expected a number of GiB above 0, got '{override}'")], "the environment")
        return int(gib * 2**30)
    device_info = of_kind(device.device_kind)
    if device_info is not None:
        return device_info.usable
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (jax.errors.JaxRuntimeError, NotImplementedError, AttributeError):  # a device that is not there
        return None


def device_mesh(spec: MeshSpec, devices: Sequence[Any], where: str = "Mesh") -> Mesh:
    """The mesh of the first devices that it takes.

    Args:
        spec: Sizes of its axes, and over how many slices.
        devices: Of a machine, or of a topology that is not there.
        where: Whose mesh it is, for the message.

    Raises:
        PlanError: there are fewer devices, or they do not lie in so many slices.
    """
    needed = spec.device_count
    if needed > len(devices):
        kind = devices[0].device_kind if devices else "none"
        sizes = " x ".join(f"{axis}={size}" for axis, size in spec.sizes.items() if size > 1)
        message = f"{sizes or 'a mesh of one'} takes {needed} devices, there are {len(devices)} ({kind})"
        raise PlanError([Problem("mesh", message)], where)
    if spec.slices == 1:
        return Mesh(_inside(tuple(spec.sizes.values()), devices[:needed]), MESH_AXES)
    across = tuple(spec.across.get(axis, 1) for axis in MESH_AXES)
    inner = tuple(size // steps for size, steps in zip(spec.sizes.values(), across, strict=True))
    groups = _slices(devices, spec.slices, needed // spec.slices, where)
    grid = np.stack([_inside(inner, group) for group in groups]).reshape(*across, *inner)
    # Each axis steps through the devices of a slice first, then to the next slice.
    count = len(MESH_AXES)
    order = [axis for pair in zip(range(count), range(count, 2 * count), strict=True) for axis in pair]
    return Mesh(grid.transpose(order).reshape(tuple(spec.sizes.values())), MESH_AXES)


def own_device(mesh: Mesh, where: str = "Mesh") -> Any:
    """A device of a mesh that belongs to this process; of devices that are not there, the first one.

    Raises:
        PlanError: some process of several has no part in the mesh, so that it would have nothing to do.
    """
    first = mesh.devices.flat[0]
    if not isinstance(first, jax.Device) or jax.process_count() == 1:
        return first
    by_process = {device.process_index: device for device in mesh.devices.flat}
    if len(by_process) < jax.process_count():
        message = (
            f"{mesh.size} devices leave {jax.process_count() - len(by_process)} of {jax.process_count()} processes "
            f"without any; there are {jax.device_count()}: use them all, or start fewer processes"
        )
        raise PlanError([Problem("mesh", message)], where)
    return by_process[jax.process_index()]


def on_devices(values: Any, sharding: jax.sharding.Sharding) -> Any:
    """Host arrays on devices, all cut in one way; not waited for.

    Args:
        values: A tree of numpy arrays, the same in every process: each gives its own devices their parts.
        sharding: Of every array.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)

    def part(value: Any) -> jax.Array:
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(part, values)


def _inside(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Devices of one slice; on a TPU's torus neighbours in the mesh are neighbours in space."""
    if devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices, dtype=object).reshape(shape)


def _slices(devices: Sequence[Any], slices: int, size: int, where: str) -> list[list[Any]]:
    """Devices by slice: as a TPU numbers them, else by process, else as many after one another as a slice takes."""
    groups: dict[Any, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "slice_index", device.process_index), []).append(device)
    if len(groups) == 1:
        return [list(devices[start : start + size]) for start in range(0, slices * size, size)]
    whole = [group[:size] for group in groups.values() if len(group) >= size]
    if len(whole) < slices:
        found = ", ".join(str(len(group)) for group in groups.values())
        message = f"{slices} slices of {size} devices are asked for, there are slices of {found}"
        raise PlanError([Problem("mesh.slices", message)], where)
    return whole[:slices]
