"""The catalogue of devices: whole, in order, with topologies that compilers know, and errors that say what would do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nnxdsl.errors import PlanError
from nnxdsl.runtime.xla_flags import GPU_MEMORY_FRACTION, prepare
from nnxdsl.sharding.hardware import DEVICES, Device, device, of_kind

GPUS = ("h200", "h100", "a100", "a100-40", "b200", "l40s", "rtx4090")
TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def test_the_catalogue_is_whole() -> None:
    assert tuple(DEVICES) == (*GPUS, *TPUS, "cpu")
    assert {name for name, entry in DEVICES.items() if entry.platform == "gpu"} == set(GPUS)
    assert {name for name, entry in DEVICES.items() if entry.platform == "tpu"} == set(TPUS)


@pytest.mark.parametrize("name", GPUS)
def test_plans_use_the_share_of_a_gpu_that_runs_take(name: str, tmp_path: Path) -> None:
    environment = {"JAX_PLATFORMS": "cuda"}
    prepare(tmp_path, 1, environment)
    memory, usable = device(name).memory, device(name).usable
    assert memory is not None
    assert usable == int(float(environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]) * memory)


@pytest.mark.parametrize("name", [*GPUS, *TPUS])
def test_figures_have_their_units(name: str) -> None:
    entry = device(name)
    assert entry.memory is not None
    assert entry.usable is not None
    assert 15e9 < entry.usable < entry.memory < 200e9  # bytes
    assert entry.flops is not None
    assert 1e14 < entry.flops < 3e15  # FLOP/s
    assert entry.bandwidth is not None
    assert entry.link is not None
    assert entry.slow_link is not None
    assert entry.slow_link < entry.link < entry.bandwidth  # bytes/s: the nearer, the faster
    # The memory-bound regime ends at a few hundred FLOPs a byte on every accelerator.
    assert 100 < entry.flops / entry.bandwidth < 700


def test_nothing_is_claimed_of_a_cpu() -> None:
    entry = device("cpu")
    assert (entry.memory, entry.usable, entry.flops, entry.bandwidth, entry.link) == (None,) * 5


def test_names_are_read_in_any_case() -> None:
    assert device("H200") is DEVICES["h200"]


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(PlanError) as caught:
        device("h20")
    assert str(caught.value) == "1 problem\n  device: there is no 'h20'; did you mean 'h200'?"
    with pytest.raises(PlanError, match="there are: a100, a100-40, b200, cpu, h100"):
        device("abacus")


@pytest.mark.parametrize(
    ("name", "count", "slices", "topology"),
    [
        ("h200", 1, 1, "1x1x1"),
        ("h200", 3, 1, "1x1x3"),
        ("h200", 8, 1, "1x1x8"),
        ("h200", 512, 1, "1x64x8"),
        ("h200", 16, 2, "2x1x8"),
        ("v5e", 8, 1, "v5e:2x4"),
        ("v5e", 16, 2, "v5e:2x4"),
        ("v6e", 256, 1, "v6e:16x16"),
        ("v5p", 8, 1, "v5p:2x2x2"),
        ("v4", 4, 1, "v4:2x2x1"),
        ("tpu7x", 8, 1, "tpu7x:2x2x1"),
        ("cpu", 64, 1, ""),
    ],
)
def test_counts_become_topologies(name: str, count: int, slices: int, topology: str) -> None:
    assert device(name).topology(count, slices=slices) == topology


def test_a_topology_may_be_named() -> None:
    assert device("v5e").topology(8, "4x2") == "v5e:4x2"
    assert device("v5p").topology(24, "v5p:2x2x6") == "v5p:2x2x6"


def test_a_device_may_have_another_memory() -> None:
    known, asked = device("h100"), device("H100:48")
    assert asked.memory == 48 * 2**30
    assert asked.usable == pytest.approx(48 * 2**30 * GPU_MEMORY_FRACTION, abs=1)
    assert asked.flops == known.flops
    assert device("cpu:16").usable == 16 * 2**30
    for wrong in ("h100:", "h100:x", "h100:0", "h100:nan", "h100:inf", "h100:-4"):
        with pytest.raises(PlanError, match="GiB of memory after the colon"):
            device(wrong)


@pytest.mark.parametrize(
    ("name", "count", "shape", "slices", "message"),
    [
        ("v5e", 12, None, 1, "there is no slice of 12 v5e; there are: 1, 4, 8, 16, 32, 64, 128, 256"),
        ("v5e", 8, "2x2", 1, "2x2 has 4 devices, not 8"),
        ("v5e", 8, "2x2x2", 1, "'2x2x2' is no shape of v5e; write it as v5e:2x2"),
        ("v5e", 8, "v6e:2x4", 1, "'v6e:2x4' is no shape of v5e; write it as v5e:2x2"),
        ("h200", 8, "2x4", 1, "only TPUs have topologies with names, not h200; leave '2x4' out"),
        ("h200", 12, None, 1, "12 h200 do not fill nodes of 8"),
        ("h200", 9, None, 2, "9 cannot be divided into 2 slice(s)"),
        ("h200", 0, None, 1, "0 cannot be divided into 1 slice(s)"),
        ("cpu", 128, None, 1, "a CPU is divided into at most 64 devices, not 128"),
    ],
)
def test_counts_that_do_not_fit_are_refused(
    name: str, count: int, shape: str | None, slices: int, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        device(name).topology(count, shape, slices=slices)
    assert [problem.message for problem in caught.value.problems] == [message]


@pytest.mark.parametrize("name", TPUS)
def test_every_usual_slice_has_its_own_number_of_devices(name: str) -> None:
    entry = device(name)
    counts = [entry.cores * sizes(shape) for shape in entry.shapes]
    assert counts == sorted(set(counts))
    assert counts[-1] <= entry.domain
    assert [entry.topology(count) for count in counts] == [f"{name}:{shape}" for shape in entry.shapes]


def sizes(shape: str) -> int:
    product = 1
    for size in shape.split("x"):
        product *= int(size)
    return product


@pytest.mark.parametrize("name", GPUS)
def test_a_target_says_what_the_catalogue_says(name: str) -> None:
    entry: Device = device(name)
    assert entry.cuda is not None
    major, minor = entry.cuda.capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} " in entry.target
    assert f"\n  device_memory_size: {entry.memory}\n" in entry.target
    assert f"\n  memory_bandwidth: {entry.bandwidth:.0f}\n" in entry.target
    assert f'device_description_str: "{entry.description}"' in entry.target
    assert entry.target.count("{") == entry.target.count("}")


def test_the_catalogue_loads_no_jax() -> None:
    code = "import sys, nnxdsl.sharding.hardware; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("TPU v5 lite", "v5e"), ("TPU7x", "tpu7x")],
)
def test_a_device_is_known_by_what_jax_calls_it(kind: str, name: str) -> None:
    assert of_kind(kind) == DEVICES[name]


def test_other_kinds_are_not_known() -> None:
    assert of_kind("cpu") is None
    assert of_kind("NVIDIA H100 PCIe") is None
