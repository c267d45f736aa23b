"""Settings of the compared runs: those that differ, or all."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from .config import ABSENT, NAMES, brief, differing, paths
from .groups import Group

CHARACTERS = 2_000
"""At most of a value."""


def settings(groups: Sequence[Group], *, everything: bool) -> tuple[str, pd.DataFrame]:
    """Returns what the table has, and the table: a row for each setting that differs, or for all."""
    configs = [group.config for group in groups]
    changed = [path for path in differing(configs) if path not in NAMES]
    shown = paths(configs) if everything else brief(configs, changed)
    words = f"{len(changed)} of {len(paths(configs))} settings differ, not counting names and notes"
    if not changed:
        words = "The settings are equal, except for names and notes"
    if len(shown) < len(changed):
        words += "; an earlier experiment that only some runs have is shown by its name"
    different = set(changed)
    rows = [
        [
            path,
            "≠" if path in different else "",
            *(config.get(path, ABSENT)[:CHARACTERS] for config in configs),
        ]
        for path in shown
    ]
    return f"{words}.", pd.DataFrame(rows, columns=["field", "differs", *(group.name for group in groups)])
