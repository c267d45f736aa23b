"""Whether the first step's policy says what was kept of the reference, which is the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from nnxdsl.data.batch import Batch, PackedPairs, PairBatch
from nnxdsl.program.compile import Program
from nnxdsl.trainer.reference_cache import DIRECTORY

FIRST_MARGIN = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference that rounding may make between the first step's log-probabilities and those kept of the
reference, by the dtype that is computed in."""


def unlike(program: Program, batch: Batch, values: Mapping[str, float], home: Path) -> Iterator[str]:
    """What to say where it does not.

    Args:
        program: Of the run.
        batch: Of the first step.
        values: That step's metrics.
        home: Directory of all runs.
    """
    if (
        program.blueprint.reference_has_own_weights
        or not isinstance(batch, PairBatch | PackedPairs)
        or batch.reference_chosen is None
    ):
        return
    rough = FIRST_MARGIN[program.blueprint.compute.name]
    for side, kept, weight in _sides(batch):
        if not weight.any():
            continue
        now, then = values[f"logps/{side}"], float(np.average(kept, weights=weight))
        if abs(now - then) > rough * abs(then):
            yield (
                f"warning: at step 0 the policy gives the {side} answers {now:.6g} nats on average, but {then:.6g} "
                f"were kept of the reference, which is the same model; delete {home / DIRECTORY} to ask it again, or "
                "set memory.reference='online'"
            )


def _sides(batch: PairBatch | PackedPairs) -> tuple[tuple[str, np.ndarray, np.ndarray], ...]:
    """What was kept of the reference under each name, and which rows that name is about."""
    if batch.desirable is None:
        sides = (("chosen", batch.reference_chosen), ("rejected", batch.reference_rejected))
        return tuple((name, kept, batch.weight) for name, kept in sides)
    shares = (("chosen", batch.desirable), ("rejected", 1 - batch.desirable))
    return tuple((name, batch.reference_chosen, batch.weight * share) for name, share in shares)
