"""Small trainable additions to a frozen model. qwix puts them in: `nnxdsl/program/adapters.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.spec.base import Spec
from nnxdsl.spec.errors import Problem
from nnxdsl.spec.limits import positive

if TYPE_CHECKING:
    from nnxdsl.spec import adapter as members


@attrs.frozen(kw_only=True)
class Adapter(Spec):
    """What is trained in place of the model's own weights."""

    LoRA: ClassVar[type[members.LoRA]]


@attrs.frozen(kw_only=True)
class LoRA(Adapter):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685).

    `y = x W + (alpha / rank) x A B`, with A drawn He-uniform and B zero, so that training starts at the model itself.
    A and B are float32.

    Attributes:
        rank: Inner dimension of A and B.
        alpha: Scale; the update is multiplied by alpha / rank.
        targets: Which linear layers: names of modules or of groups of them ("attention", "mlp", "query", "mlp.up").
    """

    rank: int = attrs.field(default=16, validator=positive)
    alpha: float = attrs.field(default=32.0, validator=positive)
    targets: tuple[str, ...] = ("attention", "mlp")

    def problems(self) -> Iterable[Problem]:
        """Targets must be there, each once."""
        return target_problems(self.targets)


def target_problems(targets: tuple[str, ...]) -> Iterable[Problem]:
    """What is wrong with a tuple of module names before any model is known."""
    if not targets:
        yield Problem("targets", "names no module; the usual choice is ('attention', 'mlp')")
    for index, target in enumerate(targets):
        if not target.strip():
            yield Problem(f"targets.{index}", "is empty")
        elif target in targets[:index]:
            yield Problem(f"targets.{index}", f"'{target}' is named twice")
