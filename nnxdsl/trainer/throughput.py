"""What a run takes of its machine: time a token, a row and a FLOP, the share of what its devices could do, memory."""

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
    """Turns the time of a step into figures.

    Attributes:
        unit: What a row is called.
        rows: Of a step.
        peak: Dense bfloat16 FLOP/s of all devices; None where it is not known, as of CPUs.
    """

    unit: str
    rows: int
    peak: float | None

    @classmethod
    def of(cls, program: Program) -> Speed:
        """That of a program on its devices."""
        experiment, devices = program.experiment, program.mesh.devices
        known = hardware.of_kind(devices.flat[0].device_kind)
        peak = known.flops * devices.size if known is not None and known.flops else None
        return cls("pairs" if experiment.objective.batch_kind == "pairs" else "samples", experiment.batch_size, peak)

    def rates(self, tokens: float, seconds: float) -> dict[str, float]:
        """What people watch: `tokens/s`, and `pairs/s` or `samples/s`."""
        return {"tokens/s": tokens / seconds, f"{self.unit}/s": self.rows / seconds}

    def use(self, flops: Flops, seconds: float) -> Mapping[str, float]:
        """What the devices do.

        `model_tflops/s` counts the fewest operations that the step's mathematics takes. `mfu` is that over the peak;
        `hfu` counts the operations that were computed. Both are left out where no peak is known.
        """
        figures = {"model_tflops/s": flops.fewest / seconds / 1e12}
        if self.peak is None:
            return figures
        shares = {"mfu": flops.fewest, "hfu": flops.executed}
        return figures | {name: count / seconds / self.peak for name, count in shares.items()}


def peak_memory_gib(devices: Iterable[jax.Device]) -> float:  # pyright: ignore[reportInvalidTypeForm]
    """The most that the fullest of these devices has held since the process began, GiB.

    CPUs keep no count: of these it is the largest resident set of the process, in which the arrays lie.
    """
    peaks = [stats["peak_bytes_in_use"] for device in devices if (stats := device.memory_stats())]
    if peaks:
        return max(peaks) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
