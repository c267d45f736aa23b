"""Settings without a tracker."""

from __future__ import annotations

from typing import ClassVar

import attrs

from nnxdsl import Tracking


@attrs.frozen(kw_only=True)
class Nowhere(Tracking):
    """No class is registered for it."""


@attrs.frozen(kw_only=True)
class Elsewhere(Tracking.TensorBoard):
    """Needs a package that nobody has."""

    library: ClassVar[str] = "no_such_package"
    extra: ClassVar[str] = ""
