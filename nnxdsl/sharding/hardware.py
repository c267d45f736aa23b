"""Devices by name: what their makers and compilers say of them, and how a compiler is told of them; knows no jax.

Figures of GPUs are of NVIDIA's data sheets, for the SXM boards in nodes of eight; "dense" excludes 2:4 sparsity.
Figures of TPUs are of https://cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x).
"""

from __future__ import annotations

import math
from typing import Literal

import attrs

from nnxdsl.errors import PlanError, Problem, suggest

Platform = Literal["cpu", "gpu", "tpu"]

_GIB = 2**30
_TAKEN = 2 * _GIB
"""Of a GPU, by others than the program: 0.6 GiB CUDA context and kernels, 0.4 GiB handles and workspaces of cuBLAS and
cuDNN, 1 GiB channels and buffers of NCCL. A reckoning, not a measurement."""

FIGURES = ("arguments", "outputs", "aliased", "temporaries", "allocated", "host", "peak")
"""What a compiler says of the memory that a program takes on a device; see `nnxdsl.planning.aot.compile_ahead`."""

MOST_CPU_DEVICES = 64
"""Virtual devices that a CPU is divided into at most: each of them takes threads and memory of this machine."""


@attrs.frozen(kw_only=True)
class Cuda:
    """What XLA's code generator asks of an NVIDIA GPU.

    Attributes:
        capability: Compute capability, major and minor.
        cores: Streaming multiprocessors.
        fpus: Float32 units of each.
        threads: Resident on each at most.
        shared_core: Bytes of shared memory of each.
        shared_block: Bytes of it that a block may opt in to.
        l2: Bytes of the L2 cache.
        clock: GHz, boosted.
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
    """One device, as `jax.devices()` counts them. None stands for what nobody can say of it beforehand.

    Attributes:
        name: In the catalogue and on the command line.
        description: For people, and what CUDA calls it.
        platform: "gpu", "tpu" or "cpu".
        memory: Bytes that it has.
        usable: Bytes that a program may take. TPUs: what XLA:TPU says when a program does not fit. GPUs: the memory
            less 2 GiB for the CUDA context, libraries and NCCL; that much only if XLA_PYTHON_CLIENT_MEM_FRACTION is
            raised, since JAX takes no more than 75% by default.
        flops: Peak FLOP/s of dense bfloat16 products that are summed in float32.
        bandwidth: Bytes/s of its own memory.
        link: Bytes/s that it can send to devices of its fast domain, all links together, in one direction. A
            collective over one axis of a TPU's torus has 2 of its 4 or 6 links.
        slow_link: Bytes/s that it can send to other domains (nodes, slices), in one direction; for GPUs the usual
            network card, which is the buyer's choice.
        domain: Devices of one fast domain: a node of GPUs, a pod of TPUs.
        cuda: What the compiler is told; of GPUs only.
        cores: Devices of one chip; of TPUs only.
        shapes: Names of the slices of this kind by number of chips; of TPUs only.
        options: Further arguments of its topologies; of TPUs only.
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

    @property
    def target(self) -> str:
        """The GPU as a text proto, `stream_executor.GpuTargetConfigProto`; empty for others."""
        return "" if self.cuda is None else _target(self, self.cuda)

    def topology(self, count: int, name: str | None = None, *, slices: int = 1) -> str:
        """What a compiler calls so many of these devices.

        Args:
            count: Devices in all.
            name: The shape of each slice of TPUs where it should not be the usual one: "4x2" or "v5e:4x2".
            slices: Fast domains that they lie in; each has as many.

        Returns:
            GPUs: "<slices>x<hosts>x<GPUs of a host>". TPUs: the shape of one slice, such as "v5p:2x2x2". CPUs: "".

        Raises:
            PlanError: there is no such number of them.
        """
        if count < 1 or slices < 1 or count % slices:
            raise self._refused(f"{count} cannot be divided into {slices} slice(s)")
        if name is not None and self.platform != "tpu":
            raise self._refused(f"only TPUs have topologies with names, not {self.name}; leave {name!r} out")
        each = count // slices
        if self.platform == "cpu":
            if count > MOST_CPU_DEVICES:
                raise self._refused(f"a CPU is divided into at most {MOST_CPU_DEVICES} devices, not {count}")
            return ""
        if self.platform == "gpu":
            hosts = 1 if each <= self.domain else each // self.domain
            if each % hosts or each // hosts > self.domain:
                raise self._refused(f"{each} {self.name} do not fill nodes of {self.domain}")
            return f"{slices}x{hosts}x{each // hosts}"
        return self._shape(each, name)

    def _shape(self, each: int, name: str | None) -> str:
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
    """The fields that XLA reads of the message; the same numbers as in XLA's own `gpu/target_config/specs`."""
    major, minor = cuda.capability
    # From Hopper on, tensor cores have instructions that only code for this very architecture may use ("sm_90a").
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
_PLANE = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SPACE = (
    *("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)


def _gpu(name: str, description: str, memory: int, cuda: Cuda, *rates: float) -> Device:
    flops, bandwidth, link, slow_link = rates
    return Device(
        name=name,
        description=description,
        platform="gpu",
        memory=memory,
        usable=memory - _TAKEN,
        flops=flops,
        bandwidth=bandwidth,
        link=link,
        slow_link=slow_link,
        domain=8,
        cuda=cuda,
    )


_DEVICES = (
    # Memory is what CUDA counts (cuDeviceTotalMem), which is less than what the board bears: of H100, A100 and B200 as
    # in XLA's target configurations, of the others to a tenth of a GiB.
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
    Device(
        name="v4",
        description="Google TPU v4",
        platform="tpu",
        memory=32 * _GIB,
        usable=int(30.75 * _GIB),
        flops=275e12,
        bandwidth=1.2e12,
        link=300e9,
        slow_link=3.125e9,
        domain=4096,
        shapes=_SPACE,
        options=(("chip_config_name", "megacore"),),
    ),
    # 16 GB, 819 GB/s, 197 TFLOP/s, 256 chips; ICI 400 GB/s in both directions; 6.4 Tb/s for a pod of 256.
    Device(
        name="v5e",
        description="Google TPU v5e",
        platform="tpu",
        memory=16 * _GIB,
        usable=int(15.75 * _GIB),
        flops=197e12,
        bandwidth=819e9,
        link=200e9,
        slow_link=3.125e9,
        domain=256,
        shapes=_PLANE,
    ),
    # "95 GiB" and 2765 GB/s, 459 TFLOP/s, 8960 chips; ICI 1200 GB/s in both directions; 50 Gb/s for a chip.
    Device(
        name="v5p",
        description="Google TPU v5p",
        platform="tpu",
        memory=96 * _GIB,
        usable=int(95.73 * _GIB),
        flops=459e12,
        bandwidth=2.765e12,
        link=600e9,
        slow_link=6.25e9,
        domain=8960,
        shapes=_SPACE,
    ),
    # 32 GB, 1638 GB/s, 918 TFLOP/s, 256 chips; ICI 800 GB/s in both directions; 4 cards of 200 Gb/s for 8 chips.
    Device(
        name="v6e",
        description="Google TPU v6e (Trillium)",
        platform="tpu",
        memory=32 * _GIB,
        usable=int(31.24 * _GIB),
        flops=918e12,
        bandwidth=1.638e12,
        link=400e9,
        slow_link=12.5e9,
        domain=256,
        shapes=_PLANE,
    ),
    # Of a chip, which is two devices: 192 GiB, 7380 GB/s, 2307 TFLOP/s, ICI 1200 GB/s in both directions, 100 Gb/s;
    # 9216 chips.
    Device(
        name="tpu7x",
        description="Google TPU7x (Ironwood), one of the two cores of a chip",
        platform="tpu",
        memory=96 * _GIB,
        usable=int(94.74 * _GIB),
        flops=2307e12 / 2,
        bandwidth=7.38e12 / 2,
        link=600e9 / 2,
        slow_link=12.5e9 / 2,
        domain=2 * 9216,
        cores=2,
        shapes=_SPACE,
    ),
    Device(name="cpu", description="the CPU of this machine, divided", platform="cpu", domain=MOST_CPU_DEVICES),
)

DEVICES: dict[str, Device] = {entry.name: entry for entry in _DEVICES}
"""Every device by name."""


def device(name: str) -> Device:
    """The device of a name, in whatever case; `h100:48` is an h100 that has 48 GiB.

    Raises:
        PlanError: there is none, with the nearest, or its memory is no number of GiB.
    """
    kind, colon, given = name.lower().partition(":")
    found = DEVICES.get(kind)
    if found is None:
        raise PlanError([Problem("device", f"there is no '{name}'{suggest(kind, DEVICES)}")])
    if not colon:
        return found
    try:
        memory = int(float(given) * _GIB)
    except (ValueError, OverflowError):
        memory = 0
    taken = (found.memory or 0) - (found.usable or 0)
    if not taken < memory <= 2**50:
        raise PlanError([Problem("device", f"'{name}': expected GiB of memory after the colon, as in '{kind}:48'")])
    description = f"{found.description} with {memory / _GIB:g} GiB"
    return attrs.evolve(found, name=f"{kind}:{given}", description=description, memory=memory, usable=memory - taken)


def of_kind(kind: str) -> Device | None:
    """The device that jax calls so (`jax.Device.device_kind`); None for one that is not in the catalogue.

    GPUs bear the name that CUDA gives them, TPUs the name of their core: "TPU v5 lite" is a v5e.
    """
    return next((entry for entry in _DEVICES if kind in (entry.description, *_KINDS.get(entry.name, ()))), None)


_KINDS = {
    "v4": ("TPU v4",),
    "v5e": ("TPU v5 lite", "TPU v5e"),
    "v5p": ("TPU v5", "TPU v5p"),
    "v6e": ("TPU v6 lite", "TPU v6e"),
    "tpu7x": ("TPU7x",),
}
