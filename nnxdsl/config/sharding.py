"""The device mesh and its sharding rules, which change nothing in a run's mathematics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import positive
from nnxdsl.errors import Problem, suggest

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment

MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""All mesh axes, slowest first: devices that are neighbours differ in the last one."""

SLOW_AXES = ("data", "stage", "fsdp")
"""The axes that may run across slices, in the order in which they are taken for it: the rarest and largest transfers
of the three are those of `data`."""

BATCH_AXES = ("data", "fsdp", "expert")
"""The axes that split the rows of a batch, unless there is a rule for "batch"."""


@attrs.frozen(kw_only=True)
class Mesh(Spec):
    """The device mesh: the product of its axes is the number of devices.

    Attributes:
        data: Devices that hold whole copies of the parameters and split the batch.
        fsdp: Devices that split both the parameters and the batch.
        tensor: Devices that split the width of layers and the vocabulary.
        context: Devices that split the tokens of each row, and the parameters.
        expert: Devices that split the experts of a layer, and the batch.
        stage: Devices that split the stack of layers, and work at the same time on different rows (a pipeline).
        slices: Groups of devices with fast links inside and slow ones between (TPU slices, NVLink domains). They are
            taken from `data`, then `stage`, then `fsdp`, whose product they must divide.
        rules: Pairs of a logical axis and the mesh axis (or several, or None) that it lies on; they replace the default
            rules of that logical axis, in their place.
        array_rules: Pairs of a pattern for the paths of arrays (`*` matches any part of one) and rules that go
            before all others for these arrays.
        indivisible: What happens to a dimension that its mesh axes do not divide: "error" refuses it, "replicate" tries
            the next rule and at last keeps whole copies, with a warning.
        zero1: Whether the optimizer's state of parameters that are copied over `data` is split over `data` (ZeRO
            stage 1, Rajbhandari et al. 2020, arXiv:1910.02054).
    """

    data: int = attrs.field(default=1, validator=positive)
    fsdp: int = attrs.field(default=1, validator=positive)
    tensor: int = attrs.field(default=1, validator=positive)
    context: int = attrs.field(default=1, validator=positive)
    expert: int = attrs.field(default=1, validator=positive)
    stage: int = attrs.field(default=1, validator=positive)
    slices: int = attrs.field(default=1, validator=positive)
    rules: tuple[tuple[str, str | tuple[str, ...] | None], ...] = ()
    array_rules: tuple[tuple[str, tuple[tuple[str, str | tuple[str, ...] | None], ...]], ...] = ()
    indivisible: Literal["error", "replicate"] = "error"
    zero1: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every mesh axis by name, slowest first."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def device_count(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def across(self) -> dict[str, int]:
        """How often each axis steps from one slice to another: the factor of its size that lies between slices."""
        sizes_across: dict[str, int] = {}
        left = self.slices
        for axis in SLOW_AXES:
            sizes_across[axis] = math.gcd(left, getattr(self, axis))
            left //= sizes_across[axis]
        return sizes_across

    def problems(self) -> Iterable[Problem]:
        """Rules must name mesh axes that exist, each once; slices must lie along the axes that may cross them."""
        yield from _rule_problems("rules", self.rules)
        for index, (_, rules) in enumerate(self.array_rules):
            yield from _rule_problems(f"array_rules.{index}.1", rules)
        if math.prod(self.across.values()) != self.slices:
            sizes = " x ".join(f"{axis}={getattr(self, axis)}" for axis in SLOW_AXES)
            yield Problem("slices", f"{self.slices} slices cannot be cut out of {sizes}")

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """The rows of a micro-batch can be split over the devices."""
        if self.splits_unevenly:
            return
        axes = {axis: count for axis in BATCH_AXES if (count := self.sizes[axis]) > 1}
        if experiment.rows_at_once % math.prod(axes.values()):
            over = " x ".join(f"{axis}={count}" for axis, count in axes.items())
            yield Problem(experiment.rows_path, f"{experiment.rows_at_once} rows cannot be split over mesh {over}")

    @property
    def splits_unevenly(self) -> bool:
        """Whether rows need not divide by the axes of a batch: an own rule for them decides, or copies are allowed."""
        return any(logical == "batch" for logical, _ in self.rules) or self.indivisible == "replicate"


def _rule_problems(path: str, rules: tuple[tuple[str, str | tuple[str, ...] | None], ...]) -> Iterable[Problem]:
    for index, (logical, target) in enumerate(rules):
        rule, axes = f"({logical!r}, {target!r})", (target,) if isinstance(target, str) else target or ()
        for axis in dict.fromkeys(axes):
            if axis not in MESH_AXES:
                yield Problem(f"{path}.{index}", f"{rule} names no mesh axis{suggest(axis, MESH_AXES)}")
            elif axes.count(axis) > 1:
                yield Problem(f"{path}.{index}", f"{rule} names the mesh axis '{axis}' twice")
