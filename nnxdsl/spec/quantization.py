"""In how few bits the frozen weights are kept. qwix does it: `nnxdsl/program/adapters.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.spec.adapter import target_problems
from nnxdsl.spec.base import Spec
from nnxdsl.spec.errors import Problem
from nnxdsl.spec.limits import positive

if TYPE_CHECKING:
    from nnxdsl.spec import quantization as members


@attrs.frozen(kw_only=True)
class Quantization(Spec):
    """Frozen linear weights in few bits, with one scale for each block of inputs.

    Attributes:
        block_size: How many inputs of a weight share a scale.
        targets: Which linear layers: names of modules or of groups of them.
    """

    NF4: ClassVar[type[members.NF4]]
    Int8: ClassVar[type[members.Int8]]

    block_size: int = attrs.field(default=64, validator=positive)
    targets: tuple[str, ...] = ("attention", "mlp")

    def problems(self) -> Iterable[Problem]:
        """Targets must be there, each once."""
        return target_problems(self.targets)


@attrs.frozen(kw_only=True)
class NF4(Quantization):
    """Four-bit normal floats (Dettmers et al. 2023, arXiv:2305.14314, appendix E).

    Attributes:
        block_size: How many inputs of a weight share a scale.
        targets: Which linear layers: names of modules or of groups of them.
    """


@attrs.frozen(kw_only=True)
class Int8(Quantization):
    """Eight-bit integers, symmetric, scaled by the largest magnitude of each block.

    Attributes:
        block_size: How many inputs of a weight share a scale.
        targets: Which linear layers: names of modules or of groups of them.
    """
