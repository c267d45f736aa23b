"""The completions of one policy, and how a checkpoint stores what later steps still train on."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nnxdsl.data.batch import RolloutBatch
from nnxdsl.rollouts.episode import Episode


class Rollout(NamedTuple):
    """Completions of one policy.

    Attributes:
        step: The optimizer step, from 0, whose policy gave them.
        rows: The row of each one's prompt.
        batch: What steps train on, in numpy.
        metrics: Rewards and lengths, under TRL's names.
        episodes: The completions, in the order of the batch; None if it was read from a checkpoint, which does not
            store them: what is made of them was written before it.
    """

    step: int
    rows: Sequence[int]
    batch: RolloutBatch
    metrics: dict[str, float]
    episodes: Sequence[Episode] | None = None

    def stored(self, *, has_episodes: bool = False) -> dict[str, Any]:
        """Plain JSON values, of the episodes as well or without them."""
        buffer = io.BytesIO()
        arrays = {name: array for name, array in self.batch._asdict().items() if array is not None}
        np.savez_compressed(buffer, **arrays)
        batch = base64.b64encode(buffer.getvalue()).decode()
        episodes = [one.stored() for one in self.episodes or ()] if has_episodes else None
        fields = {"rows": list(self.rows), "metrics": self.metrics, "batch": batch, "episodes": episodes}
        return {"step": self.step, **fields}

    @classmethod
    def restored(cls, stored: Mapping[str, Any]) -> Rollout:
        """The rollout of `stored`."""
        with np.load(io.BytesIO(base64.b64decode(stored["batch"])), allow_pickle=False) as file:
            batch = RolloutBatch(**{name: file[name] for name in file.files})
        rows = stored.get("episodes")
        episodes = None if rows is None else [Episode.restored(one) for one in rows]
        return cls(int(stored["step"]), stored.get("rows", ()), batch, dict(stored["metrics"]), episodes)
