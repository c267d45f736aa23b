"""Which device stands where: neighbours along fast axes lie in one slice, and what cannot be laid out is refused."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import numpy as np
import pytest

from nnxdsl import Mesh, PlanError
from nnxdsl.config.sharding import MESH_AXES, SLOW_AXES
from nnxdsl.sharding.mesh import device_mesh


@attrs.frozen
class Processed:
    """A device that knows the process that it belongs to."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "H200"


@attrs.frozen
class Sliced(Processed):
    """A device that knows its slice as well."""

    slice_index: int = 0


def in_slices(*sizes: int) -> list[Any]:
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    # The devices of a slice belong to several processes, as on a TPU pod.
    return [Sliced(id=i, process_index=i // 2, slice_index=owner) for i, owner in enumerate(owners)]


def in_processes(*sizes: int) -> list[Any]:
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    return [Processed(id=i, process_index=owner) for i, owner in enumerate(owners)]


def grid(asked: Mesh, devices: list[Any]) -> np.ndarray:
    mesh = device_mesh(asked, devices)
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == asked.sizes
    return np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)


def refusal(asked: Mesh, devices: list[Any]) -> str:
    with pytest.raises(PlanError) as caught:
        device_mesh(asked, devices, "Experiment 'small'")
    return str(caught.value)


@pytest.mark.parametrize("asked", [Mesh(), Mesh(fsdp=4, tensor=2), Mesh(stage=2, data=2, expert=2)])
def test_without_slices_devices_stand_in_their_order(asked: Mesh) -> None:
    count = asked.device_count
    # Those that are left over are the last.
    for devices in (in_processes(count), in_processes(count, 3), in_slices(count + 5)):
        assert grid(asked, devices).ravel().tolist() == list(range(count))


def crossings(asked: Mesh, devices: list[Any], slice_of: dict[int, int]) -> dict[str, int]:
    """For each axis, how many slices lie along one line of it; the same for every line."""
    ids, result = grid(asked, devices), {}
    for number, axis in enumerate(MESH_AXES):
        lines = np.moveaxis(ids, number, -1).reshape(-1, ids.shape[number])
        counts = {len({slice_of[i] for i in line}) for line in lines.tolist()}
        assert len(counts) == 1, (axis, ids)
        result[axis] = counts.pop()
        # Along a line, all devices of a slice stand together.
        for line in lines.tolist():
            runs = [owner for owner, _ in itertools.groupby(slice_of[i] for i in line)]
            assert len(runs) == len(set(runs)), (axis, line)
    assert sorted(ids.ravel().tolist()) == sorted(slice_of)
    return result


@pytest.mark.parametrize(
    ("asked", "across"),
    [
        (Mesh(data=2, fsdp=4, slices=2), {"data": 2}),
        (Mesh(data=4, tensor=2, slices=2), {"data": 2}),
        (Mesh(fsdp=4, tensor=2, slices=2), {"fsdp": 2}),
        (Mesh(stage=2, fsdp=2, tensor=2, slices=2), {"stage": 2}),
        (Mesh(stage=2, data=2, fsdp=2, slices=2), {"data": 2}),
        (Mesh(stage=2, data=2, fsdp=2, slices=4), {"data": 2, "stage": 2}),
        (Mesh(stage=2, data=3, fsdp=4, expert=2, context=2, tensor=2, slices=12), {"data": 3, "stage": 2, "fsdp": 2}),
        (Mesh(data=6, fsdp=2, slices=4), {"data": 2, "fsdp": 2}),
    ],
)
def test_fast_axes_stay_in_a_slice(asked: Mesh, across: dict[str, int]) -> None:
    size = asked.device_count // asked.slices
    wanted = {axis: across.get(axis, 1) for axis in MESH_AXES}
    assert {axis: asked.across.get(axis, 1) for axis in MESH_AXES} == wanted
    assert set(across) <= set(SLOW_AXES)
    slice_of = {i: i // size for i in range(asked.device_count)}
    devices = in_slices(*[size] * asked.slices)
    assert crossings(asked, devices, slice_of) == wanted
    # Where devices know no slice, their process is one; where there is one process, as many after one another.
    assert crossings(asked, in_processes(*[size] * asked.slices), slice_of) == wanted
    assert crossings(asked, in_processes(asked.device_count), slice_of) == wanted
    # The order in which devices are listed does not matter to it.
    mixed = [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]
    assert crossings(asked, mixed, slice_of) == wanted


def test_the_grid_of_two_slices() -> None:
    # data=4 over two slices: two steps inside the first, then two inside the second.
    ids = grid(Mesh(data=4, tensor=2, slices=2), in_slices(4, 4)).reshape(4, 2)
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # data=2 is all taken for the slices, and each holds two of fsdp.
    ids = grid(Mesh(stage=2, data=2, fsdp=2, slices=2), in_slices(4, 4)).reshape(2, 2, 2)
    assert ids.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_larger_slices_give_their_first_devices_and_small_ones_are_passed_over() -> None:
    assert grid(Mesh(data=2, fsdp=2, slices=2), in_slices(4, 1, 3)).reshape(2, 2).tolist() == [[0, 1], [5, 6]]


def test_too_few_devices() -> None:
    asked = Mesh(stage=2, fsdp=2, tensor=4, slices=2)
    assert refusal(asked, in_slices(4, 4)) == (
        "1 problem in Experiment 'small'\n  mesh: stage=2 x fsdp=2 x tensor=4 takes 16 devices, there are 8 (H200)"
    )
    assert refusal(Mesh(fsdp=2), []) == (
        "1 problem in Experiment 'small'\n  mesh: fsdp=2 takes 2 devices, there are 0 (none)"
    )
    assert refusal(Mesh(), []) == (
        "1 problem in Experiment 'small'\n  mesh: a mesh of one takes 1 devices, there are 0 (none)"
    )


def test_unequal_slices() -> None:
    asked = Mesh(data=2, fsdp=4, slices=2)
    assert refusal(asked, in_slices(6, 2)) == (
        "1 problem in Experiment 'small'\n  mesh.slices: the mesh needs 2 slices of 4 devices, there are slices of 6, 2"
    )
    assert refusal(asked, in_processes(2, 2, 2, 2)) == (
        "1 problem in Experiment 'small'\n"
        "  mesh.slices: the mesh needs 2 slices of 4 devices, there are slices of 2, 2, 2, 2"
    )
