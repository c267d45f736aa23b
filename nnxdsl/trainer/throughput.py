"""Throughput of a run: tokens, rows and FLOPs per second, utilisation of its devices, memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Mapping

import attrs
import jax

from nnxdsl.planning.flops import Flops
from nnxdsl.program.compile import Program
from nnxdsl.sharding import hardware


@attrs.frozen
class Speed:
    """Turns the time of a step into throughput metrics.

    Attributes:
        unit: Name of a row in metrics.
        rows: Rows of a step.
        peak: Dense bfloat16 FLOP/s of all devices; None where it is not known, as of CPUs.
    """

    unit: str
    rows: int
    peak: float | None

    @classmethod
    def of(cls, program: Program) -> Speed:
        """That of a program on its devices."""
        experiment, devices = program.experiment, program.mesh.devices
        hardware_spec = hardware.of_kind(devices.flat[0].device_kind)
        peak = hardware_spec.flops * devices.size if hardware_spec is not None and hardware_spec.flops else None
        return cls("pairs" if experiment.objective.batch_kind == "pairs" else "samples", experiment.batch_size, peak)

    def rates(self, tokens: float, seconds: float) -> dict[str, float]:
        """Throughput: `tokens/s`, and `pairs/s` or `samples/s`."""
        return {"tokens/s": tokens / seconds, f"{self.unit}/s": self.rows / seconds}

    def use(self, flops: Flops, seconds: float) -> Mapping[str, float]:
        """Utilisation of the devices.

        `model_tflops/s` counts the operations that the step's mathematics needs. `mfu` is that over the peak;
        `hfu` counts the operations that were computed. Both are left out where no peak is known.
        """
        figures = {"model_tflops/s": flops.model_flops / seconds / 1e12}
        if self.peak is None:
            return figures
        shares = {"mfu": flops.model_flops, "hfu": flops.executed}
        return figures | {name: count / seconds / self.peak for name, count in shares.items()}


def peak_memory_gib(devices: Iterable[jax.Device]) -> float:  # pyright: ignore[reportInvalidTypeForm]
    """Peak memory since the process began, the largest over these devices, in GiB.

    CPUs keep no count: of these it is the largest resident set of the process, in which the arrays lie.
    """
    peaks = [stats["peak_bytes_in_use"] for device in devices if (stats := device.memory_stats())]
    if peaks:
        return max(peaks) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
