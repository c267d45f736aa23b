"""When the state of a run is saved, and how many checkpoints are kept."""

from __future__ import annotations

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import positive


@attrs.frozen(kw_only=True)
class Checkpoint(Spec):
    """When the state of a run is saved; before each evaluation, after the last step and on a stop in any case.

    Attributes:
        every_steps: Steps between checkpoints.
        every_minutes: Minutes after which the state is saved if it has not been saved since; None for by steps alone.
        keep: How many of the newest are kept.
    """

    every_steps: int = attrs.field(default=500, validator=positive)
    every_minutes: float | None = attrs.field(default=10.0, validator=positive)
    keep: int = attrs.field(default=2, validator=positive)
