"""A module that must not be imported: it leaves a mark where it is."""

from __future__ import annotations

import os
from typing import ClassVar

import attrs

from nnxdsl import Objective

os.environ["HER_LAB_WAS_IMPORTED"] = "1"


@attrs.frozen(kw_only=True)
class Hers(Objective):
    """An objective."""

    batch_kind: ClassVar[str] = "pairs"


def longest(completion: str) -> float:
    """A reward: the length of the answer in characters."""
    os.environ["HER_LAB_WAS_CALLED"] = "1"
    return float(len(completion))
