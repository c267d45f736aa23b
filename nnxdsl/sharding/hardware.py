"""Devices by name: published memory and speeds, and their descriptions for ahead-of-time compilers. Loads no jax.

Figures of GPUs are from NVIDIA's data sheets, for the SXM boards in nodes of eight; "dense" excludes 2:4 sparsity.
Figures of TPUs are from https://cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from nnxdsl.errors import PlanError, Problem, suggest
from nnxdsl.runtime.xla_flags import GPU_MEMORY_FRACTION

Platform = Literal["cpu", "gpu", "tpu"]

_GIB = 2**30

FIGURES = ("arguments", "outputs", "aliased", "temporaries", "allocated", "host", "peak")
"""Memory figures of a compiled program; see `nnxdsl.planning.aot.compile_ahead`."""

MAX_CPU_DEVICES = 64
"""Maximal number of virtual devices of a CPU: each takes threads and memory of this machine."""


@attrs.frozen(kw_only=True)
class Cuda:
    """Properties of an NVIDIA GPU that XLA's code generator reads.

    Attributes:
        capability: Compute capability, major and minor.
        cores: Streaming multiprocessors.
        fpus: Float32 units per multiprocessor.
        threads: Maximal resident threads per multiprocessor.
        shared_core: Bytes of shared memory per multiprocessor.
        shared_block: Bytes of shared memory that a block may opt in to.
        l2: Bytes of the L2 cache.
        clock: Boost clock in GHz.
    """

    capability: tuple[int, int]
    cores: int
    fpus: int = 128
    threads: int = 2048
    shared_core: int
    shared_block: int
    l2: int
    clock: float


@attrs.frozen(kw_only=True)
class Device:
    """One device, as `jax.devices()` counts them; None stands for an unknown figure.

    Attributes:
        name: In the catalogue and on the command line.
        description: For people; for GPUs the name that CUDA gives it.
        platform: "gpu", "tpu" or "cpu".
        memory: Bytes in total.
        usable: Bytes that a program may use. TPUs: what XLA:TPU reports when a program does not fit. GPUs: the share
            that runs have JAX take, `xla_flags.GPU_MEMORY_FRACTION`.
        flops: Peak FLOP/s of dense bfloat16 products with float32 accumulation.
        bandwidth: Bytes/s of its own memory.
        link: Bytes/s that it can send within its fast domain, all links together, in one direction. A collective over
            one axis of a TPU's torus has 2 of its 4 or 6 links.
        slow_link: Bytes/s that it can send to other domains (nodes, slices), in one direction; for GPUs the usual
            network card, which is the buyer's choice.
        domain: Devices of one fast domain: a node of GPUs, a pod of TPUs.
        cuda: Properties for XLA's code generator; GPUs only.
        cores: Devices of one chip; TPUs only.
        shapes: Names of slices, ascending by number of chips; TPUs only.
        options: Further arguments of JAX topologies; TPUs only.
        kinds: Names in `jax.Device.device_kind`; TPUs only, GPUs have `description` there.
    """

    name: str
    description: str
    platform: Platform
    memory: int | None = None
    usable: int | None = None
    flops: float | None = None
    bandwidth: float | None = None
    link: float | None = None
    slow_link: float | None = None
    domain: int
    cuda: Cuda | None = None
    cores: int = 1
    shapes: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    kinds: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The GPU as a text proto, `stream_executor.GpuTargetConfigProto`; empty for other devices."""
        return "" if self.cuda is None else _target(self, self.cuda)

    def topology(self, count: int, name: str | None = None, *, slices: int = 1) -> str:
        """The compiler's name for `count` of these devices.

        Args:
            count: Number of devices.
            name: The shape of each slice of TPUs, if not the usual one: "4x2" or "v5e:4x2".
            slices: Number of fast domains, all of one size.

        Returns:
            GPUs: "<slices>x<hosts>x<GPUs of a host>". TPUs: the shape of one slice, such as "v5p:2x2x2". CPUs: "".

        Raises:
            PlanError: There is no topology of that many devices.
        """
        if count < 1 or slices < 1 or count % slices:
            raise self._refused(f"{count} cannot be divided into {slices} slice(s)")
        if name is not None and self.platform != "tpu":
            raise self._refused(f"only TPUs have topologies with names, not {self.name}; leave {name!r} out")
        each = count // slices
        if self.platform == "cpu":
            if count > MAX_CPU_DEVICES:
                raise self._refused(f"a CPU is divided into at most {MAX_CPU_DEVICES} devices, not {count}")
            return ""
        if self.platform == "gpu":
            hosts = 1 if each <= self.domain else each // self.domain
            if each % hosts or each // hosts > self.domain:
                raise self._refused(f"{each} {self.name} do not fill nodes of {self.domain}")
            return f"{slices}x{hosts}x{each // hosts}"
        return self._slice_shape(each, name)

    def _slice_shape(self, each: int, name: str | None) -> str:
        if name is None:
            by_count = {self.cores * _chips(shape): shape for shape in self.shapes}
            if each not in by_count:
                there_are = ", ".join(map(str, by_count))
                raise self._refused(f"there is no slice of {each} {self.name}; there are: {there_are}")
            return f"{self.name}:{by_count[each]}"
        shape = name.removeprefix(f"{self.name}:")
        sizes = shape.split("x")
        dimensions = self.shapes[0].count("x") + 1
        if not all(size.isdecimal() and int(size) for size in sizes) or len(sizes) != dimensions:
            raise self._refused(f"{name!r} is no shape of {self.name}; write it as {self.name}:{self.shapes[1]}")
        if self.cores * _chips(shape) != each:
            raise self._refused(f"{name} has {self.cores * _chips(shape)} devices, not {each}")
        return f"{self.name}:{shape}"

    def _refused(self, message: str) -> PlanError:
        return PlanError([Problem("device", message)], self.description)


def _chips(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))


def _target(device: Device, cuda: Cuda) -> str:
    """The fields of the message that XLA reads; the numbers are those of XLA's own `gpu/target_config/specs`."""
    major, minor = cuda.capability
    # From Hopper on, some tensor core instructions need code for exactly this architecture ("sm_90a").
    extension = "feature_extension: ACCELERATED_FEATURES " if major >= 9 else ""
    return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {extension}}}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {cuda.shared_core}
  threads_per_core_limit: {cuda.threads}
  core_count: {cuda.cores}
  fpus_per_core: {cuda.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {device.bandwidth:.0f}
  l2_cache_size: {cuda.l2}
  clock_rate_ghz: {cuda.clock}
  device_memory_size: {device.memory}
  shared_memory_per_block_optin: {cuda.shared_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{device.description}"
"""


_KIB, _MIB = 2**10, 2**20
_HOPPER = Cuda(capability=(9, 0), cores=132, shared_core=228 * _KIB, shared_block=227 * _KIB, l2=50 * _MIB, clock=1.98)
_AMPERE = Cuda(
    capability=(8, 0), cores=108, fpus=64, shared_core=164 * _KIB, shared_block=163 * _KIB, l2=40 * _MIB, clock=1.41
)
_ADA = Cuda(
    capability=(8, 9), cores=142, threads=1536, shared_core=100 * _KIB, shared_block=99 * _KIB, l2=96 * _MIB, clock=2.52
)
_TORUS_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_TORUS_3D = (
    *("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)


def _device(name: str, description: str, memory: int, usable: int, rates: Sequence[float], **others: Any) -> Device:
    flops, bandwidth, link, slow_link = rates
    speeds = {"flops": flops, "bandwidth": bandwidth, "link": link, "slow_link": slow_link}
    return Device(name=name, description=description, memory=memory, usable=usable, **speeds, **others)


def _gpu(name: str, description: str, memory: int, cuda: Cuda, *rates: float) -> Device:
    usable = int(GPU_MEMORY_FRACTION * memory)
    return _device(name, description, memory, usable, rates, platform="gpu", domain=8, cuda=cuda)


def _tpu(name: str, description: str, memory: int, usable: float, *rates: float, **others: Any) -> Device:
    """A TPU; `memory` and `usable` are in GiB."""
    return _device(name, description, memory * _GIB, int(usable * _GIB), rates, platform="tpu", **others)


_DEVICES = (
    # Memory is cuDeviceTotalMem, which is less than the nominal size of the board: for H100, A100 and B200 as in XLA's
    # target configurations, for the others to a tenth of a GiB.
    # H200 data sheet: 989 TFLOP/s dense, 4.8 TB/s, NVLink 900 GB/s in both directions; DGX H200: a 400 Gb/s card each.
    _gpu("h200", "NVIDIA H200", int(139.8 * _GIB), _HOPPER, 989e12, 4.8e12, 450e9, 50e9),
    # H100 SXM5 data sheet: 989 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s; DGX H100: a 400 Gb/s card each.
    _gpu("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, _HOPPER, 989e12, 3.35e12, 450e9, 50e9),
    # A100 SXM4 data sheet: 312 TFLOP/s, 2039 GB/s (80 GB), 1555 GB/s (40 GB), NVLink 600 GB/s; DGX A100: 200 Gb/s each.
    _gpu("a100", "NVIDIA A100-SXM4-80GB", 85_100_068_864, _AMPERE, 312e12, 2.039e12, 300e9, 25e9),
    _gpu("a100-40", "NVIDIA A100-SXM4-40GB", 42_298_834_944, _AMPERE, 312e12, 1.555e12, 300e9, 25e9),
    # HGX B200 data sheet: 2.25 PFLOP/s dense, 8 TB/s, NVLink 1.8 TB/s; DGX B200: a 400 Gb/s card each.
    _gpu(
        "b200",
        "NVIDIA B200",
        191_514_411_008,
        attrs.evolve(_HOPPER, capability=(10, 0), cores=148, l2=132_644_864, clock=1.965),
        *(2.25e15, 8e12, 900e9, 50e9),
    ),
    # L40S data sheet: 362 TFLOP/s, 864 GB/s, PCIe 4.0 x16 and no NVLink (32 GB/s); network assumed: 200 Gb/s for two.
    _gpu("l40s", "NVIDIA L40S", int(44.4 * _GIB), _ADA, 362e12, 864e9, 32e9, 12.5e9),
    # Ada whitepaper, appendix A: 165.2 TFLOP/s, 1008 GB/s, PCIe 4.0 x16; network assumed: 10 Gb/s.
    _gpu(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        int(23.6 * _GIB),
        attrs.evolve(_ADA, cores=128, l2=72 * _MIB),
        *(165.2e12, 1.008e12, 32e9, 1.25e9),
    ),
    # 32 GiB, 1200 GB/s, 275 TFLOP/s, 4096 chips; 6 links of 50 GB/s (Jouppi et al. 2023, arXiv:2304.01433, table 1).
    # Both cores of a chip are one device ("megacore"), as on a Cloud TPU VM; the data centre's network: 200 Gb/s for 8.
    _tpu(
        *("v4", "Google TPU v4", 32, 30.75, 275e12, 1.2e12, 300e9, 3.125e9),
        domain=4096,
        shapes=_TORUS_3D,
        options=(("chip_config_name", "megacore"),),
        kinds=("TPU v4",),
    ),
    # 16 GB, 819 GB/s, 197 TFLOP/s, 256 chips; ICI 400 GB/s in both directions; 6.4 Tb/s for a pod of 256.
    _tpu(
        *("v5e", "Google TPU v5e", 16, 15.75, 197e12, 819e9, 200e9, 3.125e9),
        domain=256,
        shapes=_TORUS_2D,
        kinds=("TPU v5 lite", "TPU v5e"),
    ),
    # "95 GiB" and 2765 GB/s, 459 TFLOP/s, 8960 chips; ICI 1200 GB/s in both directions; 50 Gb/s for a chip.
    _tpu(
        *("v5p", "Google TPU v5p", 96, 95.73, 459e12, 2.765e12, 600e9, 6.25e9),
        domain=8960,
        shapes=_TORUS_3D,
        kinds=("TPU v5", "TPU v5p"),
    ),
    # 32 GB, 1638 GB/s, 918 TFLOP/s, 256 chips; ICI 800 GB/s in both directions; 4 cards of 200 Gb/s for 8 chips.
    _tpu(
        *("v6e", "Google TPU v6e (Trillium)", 32, 31.24, 918e12, 1.638e12, 400e9, 12.5e9),
        domain=256,
        shapes=_TORUS_2D,
        kinds=("TPU v6 lite", "TPU v6e"),
    ),
    # Of a chip, which is two devices: 192 GiB, 7380 GB/s, 2307 TFLOP/s, ICI 1200 GB/s in both directions, 100 Gb/s;
    # 9216 chips.
    _tpu(
        *("tpu7x", "Google TPU7x (Ironwood), one of the two cores of a chip", 96, 94.74),
        *(2307e12 / 2, 7.38e12 / 2, 600e9 / 2, 12.5e9 / 2),
        domain=2 * 9216,
        cores=2,
        shapes=_TORUS_3D,
        kinds=("TPU7x",),
    ),
    Device(name="cpu", description="the CPU of this machine, divided", platform="cpu", domain=MAX_CPU_DEVICES),
)

DEVICES: dict[str, Device] = {entry.name: entry for entry in _DEVICES}
"""Every device by name."""


def device(name: str) -> Device:
    """The device of a name, case-insensitive; `h100:48` is an h100 with 48 GiB.

    Raises:
        PlanError: There is no such device (names the nearest), or the memory is not a number of GiB.
    """
    kind, colon, gib = name.lower().partition(":")
    entry = DEVICES.get(kind)
    if entry is None:
        raise PlanError([Problem("device", f"there is no '{name}'{suggest(kind, DEVICES)}")])
    if not colon:
        return entry
    try:
        memory = int(float(gib) * _GIB)
    except (ValueError, OverflowError):
        memory = 0
    if not 0 < memory <= 2**50:
        raise PlanError([Problem("device", f"'{name}': expected GiB of memory after the colon, as in '{kind}:48'")])
    description = f"{entry.description} with {memory / _GIB:g} GiB"
    usable = int(memory * entry.usable / entry.memory) if entry.usable and entry.memory else memory
    return attrs.evolve(entry, name=f"{kind}:{gib}", description=description, memory=memory, usable=usable)


def of_kind(kind: str) -> Device | None:
    """The device of a `jax.Device.device_kind`, such as "TPU v5 lite" for a v5e; None if the catalogue lacks it."""
    return next((entry for entry in _DEVICES if kind in (entry.description, *entry.kinds)), None)
