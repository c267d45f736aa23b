"""Compares the first step's log-probabilities with the precomputed ones of the reference, which is the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import numpy as np

from nnxdsl.data.batch import Batch, PackedPairs, PairBatch
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.program.compile import Program
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.hooks.base import Hook, StepMetrics
from nnxdsl.trainer.precompute_specs import REFERENCE
from nnxdsl.trainer.trainer import Trainer

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference that rounding may make between both, by compute dtype."""


@attrs.define
class ReferenceCheck(Hook):
    """Warns if precomputed reference log-probabilities do not fit the first policy.

    Attributes:
        attempt: The run.
        sampler: The batches, which hold the precomputed values.
    """

    attempt: Attempt
    sampler: BatchSampler

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Compares them at step 0."""
        if metrics.step == 0:
            cache = self.attempt.directory.path.parent / REFERENCE
            for warning in reference_mismatch(trainer.program, self.sampler.batch_at(0), metrics.values, cache):
                self.attempt.reporter.event(warning)


def reference_mismatch(program: Program, batch: Batch, values: Mapping[str, float], cache: Path) -> Iterator[str]:
    """Warnings where the policy of step 0 and the precomputed reference differ by more than rounding.

    Args:
        program: Of the run.
        batch: Of the first step.
        values: That step's metrics.
        cache: Directory of the precomputed values.
    """
    if (
        program.blueprint.reference.has_own_weights
        or not isinstance(batch, PairBatch | PackedPairs)
        or batch.reference_chosen is None
    ):
        return
    tolerance = TOLERANCE[program.blueprint.compute.name]
    for side, cached, weight in _sides(batch):
        if not weight.any():
            continue
        policy, reference = values[f"logps/{side}"], float(np.average(cached, weights=weight))
        if abs(policy - reference) > tolerance * abs(reference):
            yield (
                f"warning: at step 0 logps/{side} of the policy is {policy:.6g}, but {reference:.6g} by precomputed "
                f"reference log-probs, which are of the same model; delete {cache} to compute them again, or set "
                "memory.reference='online'"
            )


def _sides(batch: PairBatch | PackedPairs) -> tuple[tuple[str, np.ndarray, np.ndarray], ...]:
    """Precomputed log-probabilities by the name of their metric, and the weight of each row in it."""
    if batch.desirable is None:
        sides = (("chosen", batch.reference_chosen), ("rejected", batch.reference_rejected))
        return tuple((name, cached, batch.weight) for name, cached in sides)
    shares = (("chosen", batch.desirable), ("rejected", 1 - batch.desirable))
    return tuple((name, batch.reference_chosen, batch.weight * share) for name, share in shares)
