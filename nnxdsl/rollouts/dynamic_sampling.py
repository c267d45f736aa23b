"""Dynamic sampling: groups without a spread of rewards teach nothing, and the next prompts take their place.

DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Selected(NamedTuple):
    """The completions of a batch.

    Attributes:
        indices: Of all completions that were sampled, those of the batch, groups one after another `[B]`.
        counts: Which of them are of groups with a spread `[B]`; the others fill up the batch.
    """

    indices: npt.NDArray[np.int64]
    counts: npt.NDArray[np.bool_]


def has_spread(totals: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.bool_]:
    """Whether the completions of each group have different rewards.

    Args:
        totals: The reward of each completion, groups one after another; NaN for none.
        size: Completions of a group.
    """
    groups = [group[~np.isnan(group)] for group in totals.reshape(-1, size)]
    return np.array([group.size > 0 and not np.isclose(group.std(), 0) for group in groups], bool)


def select(totals: npt.NDArray[np.float64], size: int, groups: int) -> Selected:
    """The first `groups` groups with a spread, and then, where these are fewer, the first of the others.

    Args:
        totals: As in `has_spread`.
        size: Completions of a group.
        groups: Groups of a batch.
    """
    spread = has_spread(totals, size)
    first = np.argsort(~spread, kind="stable")[:groups]
    return Selected((first[:, None] * size + np.arange(size)).reshape(-1), np.repeat(spread[first], size))
