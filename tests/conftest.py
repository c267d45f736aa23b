"""Laws are tried on the same examples every time, unless asked for others: HYPOTHESIS_PROFILE=default pytest ..."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("same examples", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same examples"))
