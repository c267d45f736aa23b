"""Where and how a run is computed, which changes nothing in its mathematics: devices, memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import attrs

from nnxdsl.spec.base import Spec
from nnxdsl.spec.errors import Problem, suggest
from nnxdsl.spec.limits import positive

MESH_AXES = ("data", "fsdp", "tensor")


@attrs.frozen(kw_only=True)
class Mesh(Spec):
    """How many devices share which work: their product is the number of devices.

    Attributes:
        data: Devices that hold whole copies of the parameters and split the batch.
        fsdp: Devices that split both the parameters and the batch.
        tensor: Devices that split the width of layers and the vocabulary.
        rules: Pairs of a logical axis and the mesh axis (or several, or None) that it lies on; they replace the default
            rules of that logical axis, in their place.
    """

    data: int = attrs.field(default=1, validator=positive)
    fsdp: int = attrs.field(default=1, validator=positive)
    tensor: int = attrs.field(default=1, validator=positive)
    rules: tuple[tuple[str, str | tuple[str, ...] | None], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every mesh axis by name, slowest first."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def device_count(self) -> int:
        """How many devices the mesh takes."""
        return math.prod(self.sizes.values())

    def problems(self) -> Iterable[Problem]:
        """Rules must name mesh axes that exist, each once."""
        for index, (logical, target) in enumerate(self.rules):
            rule, axes = f"({logical!r}, {target!r})", (target,) if isinstance(target, str) else target or ()
            for axis in dict.fromkeys(axes):
                if axis not in MESH_AXES:
                    yield Problem(f"rules.{index}", f"{rule} names no mesh axis{suggest(axis, MESH_AXES)}")
                elif axes.count(axis) > 1:
                    yield Problem(f"rules.{index}", f"{rule} names the mesh axis '{axis}' twice")


@attrs.frozen(kw_only=True)
class Memory(Spec):
    """What is kept and what is computed again.

    Attributes:
        remat: "none" keeps all activations for the backward pass; "full" keeps the inputs of each period of layers and
            computes the rest again.
        logprob_tokens: Tokens whose logits exist at one time, per micro-batch.
    """

    remat: Literal["none", "full"] = "none"
    logprob_tokens: int = attrs.field(default=2048, validator=positive)
