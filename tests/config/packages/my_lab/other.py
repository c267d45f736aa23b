"""A class that has the name of another one."""

from __future__ import annotations

from typing import ClassVar

import attrs

from nnxdsl import Objective


@attrs.frozen(kw_only=True)
class SimPO(Objective):
    """Another SimPO.

    Attributes:
        margin: A number.
    """

    batch_kind: ClassVar[str] = "pairs"

    margin: float = 0.0
