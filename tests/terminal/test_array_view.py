"""The device grid of an array: blocks compared with JAX's own shardings, and whole drawings of known meshes.

Run as a program, this file compares with JAX in a process of its own, where the machine counts as eight devices.
"""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from nnxdsl.config.sharding import MESH_AXES, Mesh
from nnxdsl.errors import RunError, SpecError
from nnxdsl.terminal.array_view import Grid, blocks, draw, slices_of
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]


def mesh(**sizes: int) -> dict[str, int]:
    return {axis: sizes.get(axis, 1) for axis in MESH_AXES}


def plan(on: dict[str, int], shape: Sequence[int], spec: Sequence[Any], across: dict[str, int] | None = None) -> Any:
    """A plan of one array, as far as it is drawn."""
    entries = [[entry] if isinstance(entry, str) else entry or [] for entry in spec]
    shards = [math.prod(on[axis] for axis in entry) for entry in entries]
    device_shape = [size // pieces for size, pieces in zip(shape, shards, strict=True)]
    array = {
        "path": "layers.blocks.0.mlp.up.kernel",
        "group": "layers.blocks.*.mlp.up.kernel",
        "part": "frozen",
        "axes": ["embed", "mlp", None][: len(shape)],
        "dtype": "bfloat16",
        "shape": list(shape),
        "spec": list(spec),
        "device_shape": device_shape,
        "bytes": 2 * math.prod(shape),
        "device_bytes": 2 * math.prod(device_shape),
        "replicas": math.prod(on.values()) // math.prod(shards),
        "memory": "device",
        "why": [],
    }
    return {"mesh": on, "arrays": [array], "slices": math.prod((across or {}).values()), "across": across or {}}


def rendered(result: Any, width: int = 80, path: str = "up.kernel", **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)
    draw(result, path, console)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def grid_lines(text: str) -> list[str]:
    """The picture alone: between the two empty lines."""
    return text.split("\n\n")[1].splitlines()


@st.composite
def cases(draw_: st.DrawFn) -> tuple[dict[str, int], list[int], list[Any]]:
    """A mesh of at most eight devices, and a shape that its spec divides."""
    order = draw_(st.permutations(MESH_AXES))
    sizes, left = {}, 8
    for axis in order:
        sizes[axis] = draw_(st.integers(1, min(left, 4)))
        left //= sizes[axis]
    on = mesh(**sizes)
    used = list(order[: draw_(st.integers(0, 6))])
    spec: list[Any] = []
    for _ in range(draw_(st.integers(1, 3))):
        entry = [used.pop() for _ in range(min(len(used), draw_(st.integers(0, 3))))]
        spec.append(None if not entry else entry[0] if len(entry) == 1 and draw_(st.booleans()) else entry)
    shards = [math.prod(on[axis] for axis in ([e] if isinstance(e, str) else e or [])) for e in spec]
    shape = [pieces * draw_(st.integers(1, 3)) for pieces in shards] + draw_(st.lists(st.integers(1, 3), max_size=1))
    return on, shape, spec


@settings(max_examples=200, deadline=None, database=None)
@given(cases())
def agrees_with_jax(case: tuple[dict[str, int], list[int], list[Any]]) -> None:
    import jax  # noqa: PLC0415  (only in the process that counts eight devices)

    on, shape, spec = case
    devices = np.array(jax.devices()[: math.prod(on.values())]).reshape(tuple(on.values()))
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in spec]
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, tuple(on)), jax.sharding.PartitionSpec(*entries))
    begins = {
        device: tuple(part.indices(size)[0] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(tuple(shape)).items()
    }
    order = sorted(set(begins.values()))  # row-major: by the first dimension, then the second
    held = blocks(shape, spec, on)
    for place in np.ndindex(*devices.shape):
        assert held[place] == order.index(begins[devices[place]])


def test_blocks_are_those_of_jax() -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, __file__]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout == "agreed on 8 devices\n"


def test_blocks_of_a_known_mesh() -> None:
    held = blocks((4, 8, 6), (None, "fsdp", "tensor"), {"data": 2, "fsdp": 2, "tensor": 2})
    assert held.tolist() == [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]
    # The order of the axes within a dimension is the spec's, not the mesh's.
    assert blocks((8,), (("tensor", "fsdp"),), {"fsdp": 2, "tensor": 2}).tolist() == [[0, 2], [1, 3]]
    assert blocks((), (), {"fsdp": 2}).tolist() == [0, 0]
    with pytest.raises(ValueError, match="2 entries of a partition for 1 dimensions"):
        blocks((8,), (None, "fsdp"), {"fsdp": 2})


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_slices_are_of_one_size_and_whole_inside(data: int, fsdp: int, stage: int, wanted: int) -> None:
    slices = math.gcd(wanted, data * stage * fsdp)
    try:
        asked = Mesh(data=data, fsdp=fsdp, stage=stage, tensor=2, slices=slices)
    except SpecError:
        reject()  # they cannot be cut out of these axes
    actual = slices_of(asked.sizes, asked.across)
    numbers, counts = np.unique(actual, return_counts=True)
    assert numbers.tolist() == list(range(slices))
    assert set(counts.tolist()) == {asked.device_count // slices}
    assert np.array_equal(actual[..., 0], actual[..., 1])


def test_a_picture_in_full() -> None:
    actual = plan(mesh(data=2, fsdp=4, tensor=2), [1152, 6912], ["fsdp", "tensor"], {"data": 2})
    assert rendered(actual) == (
        "layers.blocks.0.mlp.up.kernel  (frozen)\n"
        "array        bfloat16 1152x6912, 15.19 MiB\n"
        "mesh         data=2 x fsdp=4 x tensor=2 (16 devices)\n"
        "partition    fsdp, tensor\n"
        "each device  288x3456, 1.898 MiB; x2: 2 devices hold the same block\n"
        "\n"
        "        fsdp   0       1       2       3\n"
        "data  tensor   0   1   0   1   0   1   0   1\n"
        "0              0   1   2   3   4   5   6   7   slice 0\n"
        "              ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━\n"
        "1              0   1   2   3   4   5   6   7   slice 1\n"
        "\n"
        "each cell is a device, with the number and colour of its block\n"
        "8 blocks, each on 2 devices (x2)\n"
        "heavy lines separate the 2 slices\n"
        "  block 0: [0:288, 0:3456]  (embed over fsdp, mlp over tensor)\n"
        "  block 1: [0:288, 3456:6912]\n"
        "  block 2: [288:576, 0:3456]\n"
        "  block 3: [288:576, 3456:6912]\n"
        "  block 4: [576:864, 0:3456]\n"
        "  block 5: [576:864, 3456:6912]\n"
        "  block 6: [864:1152, 0:3456]\n"
        "  block 7: [864:1152, 3456:6912]\n"
    )


def test_slices_along_two_axes_are_parted_both_ways() -> None:
    actual = plan(mesh(data=2, fsdp=4), [8], ["fsdp"], {"data": 2, "fsdp": 2})
    assert grid_lines(rendered(actual)) == [
        "data  fsdp   0   1    2   3",
        "0            0   1  ┃ 2   3",
        "            ━━━━━━━━╋━━━━━━━━",
        "1            0   1  ┃ 2   3",
    ]


def test_one_device_and_one_axis() -> None:
    assert grid_lines(rendered(plan(mesh(), [6], [None]))) == [" 0"]
    assert grid_lines(rendered(plan(mesh(context=4), [6], [None]))) == [
        "context   0   1   2   3",
        "          0   0   0   0",
    ]


def test_a_long_axis_goes_on_in_the_next_row() -> None:
    text = rendered(plan(mesh(fsdp=64), [64], ["fsdp"]), width=60)
    assert grid_lines(text)[:3] == [
        "fsdp  fsdp   +0  +1  +2  +3  +4  +5  +6  +7",
        "0            0   1   2   3   4   5   6   7",
        "8            8   9   10  11  12  13  14  15",
    ]
    assert len(grid_lines(text)) == 9
    assert "fsdp is split into rows of 8 devices" in text
    assert "left out" not in text


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize(
    ("on", "spec", "across"),
    [
        (mesh(fsdp=256), ["fsdp"], None),
        (mesh(data=16, fsdp=64, tensor=8), [["fsdp", "tensor"]], {"data": 4}),
        (mesh(stage=4, data=8, fsdp=32, expert=2, context=2, tensor=4), [["fsdp", "tensor", "stage"]], {"data": 8}),
        (mesh(fsdp=7919), ["fsdp"], None),
        (mesh(fsdp=512, tensor=2), [None], None),
        (mesh(data=1024), ["fsdp"], {"data": 16}),
    ],
    ids=str,
)
def test_large_meshes_fit_and_say_what_is_left_out(
    on: dict[str, int], spec: list[Any], across: dict[str, int] | None, width: int
) -> None:
    actual = plan(on, [math.prod(on.values())], spec, across)
    text = rendered(actual, width)
    assert max(map(cell_len, text.splitlines())) <= width
    digits = len(str(int(blocks([1], spec, on).max())))
    grid = Grid.choose(on, digits, width, across is not None)
    if width >= 80:  # nothing is cut off at the edge
        held = blocks([1], spec, on)
        assert all(line.cell_len <= width for line in grid.lines(held, slices_of(on, across or {})))
    whole, shown = math.prod(on.values()), grid.rows_shown * grid.columns_shown
    assert grid.rows * grid.columns == whole
    assert grid.rows_shown <= 32
    assert grid.columns_shown <= 64
    message = " ".join(text.split())
    assert (f"left out: {whole - shown:,} of {whole:,} devices" in message) == (shown < whole)
    if whole == 256 and width >= 80:
        assert shown == whole


def test_2048_devices_are_all_drawn_where_there_is_room() -> None:
    on = mesh(data=32, fsdp=8, tensor=8)
    text = rendered(plan(on, [8], ["tensor"]), width=200)
    assert "left out" not in text
    rows = [line.split() for line in grid_lines(text)[2:]]
    assert len(rows) == 32
    assert all(row[1:] == [str(block) for _ in range(8) for block in range(8)] for row in rows)


def test_colour_is_added_and_never_needed() -> None:
    actual = plan(mesh(fsdp=2, tensor=2), [4, 4], ["fsdp", None])
    coloured = rendered(actual, force_terminal=True, color_system="truecolor")
    assert "\x1b[30;48;2;141;211;199m 0  \x1b[0m" in coloured
    assert "\x1b[30;48;2;255;217;47m 1  \x1b[0m" in coloured
    assert grid_lines(rendered(actual)) == ["fsdp  tensor   0   1", "0              0   0", "1              1   1"]


def test_no_such_array() -> None:
    with pytest.raises(RunError, match=r"no array 'up\.kernels'"):
        rendered(plan(mesh(), [6], [None]), path="up.kernels")


if __name__ == "__main__":
    agrees_with_jax()
    import jax

    sys.stdout.write(f"agreed on {jax.device_count()} devices\n")
