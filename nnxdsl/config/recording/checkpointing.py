"""When the state of a run is saved, and how many checkpoints are kept."""

from __future__ import annotations

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import positive


@attrs.frozen(kw_only=True)
class Checkpoint(Spec):
    """When the state of a run is saved; it is saved after the last step and on a stop in any case.

    Attributes:
        every_steps: Steps between checkpoints.
        keep: How many of the newest are kept.
    """

    every_steps: int = attrs.field(default=500, validator=positive)
    keep: int = attrs.field(default=2, validator=positive)
