"""An objective and a data source of somebody else's: all that a third party writes for the language."""

from __future__ import annotations

from typing import ClassVar

import attrs

from nnxdsl import Data, Objective
from nnxdsl.config.core.validators import positive
from nnxdsl.config.data import FileData


@attrs.frozen(kw_only=True)
class SimPO(Objective):
    """Simple preference optimisation (Meng et al. 2024, arXiv:2405.14734).

    Attributes:
        beta: Scale of the length-normalised rewards.
        gamma: Margin between them.
    """

    batch_kind: ClassVar[str] = "pairs"
    needs_reference: ClassVar[bool] = False

    beta: float = attrs.field(default=2, validator=positive)
    gamma: float = 1


@attrs.frozen(kw_only=True)
class Mixture(FileData):
    """Pairs of several sources, taken in turn.

    Attributes:
        sources: What is mixed.
    """

    batch_kind: ClassVar[str] = "pairs"
    rows: ClassVar[str] = "preference pairs"

    sources: tuple[Data, ...]
