"""What an adapter asks of the rest of an experiment: the run that it goes on from, and where its dropout can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nnxdsl.config.adapter import LowRank
from nnxdsl.config.batching import Packed
from nnxdsl.config.weights import PEFT, From
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment

SAME = ("rank", "alpha", "targets", "scaling", "ranks", "alphas")
"""Fields in which an adapter must be like the one that it goes on with."""
DROPOUT_OF_PACKED = (
    "{} cannot be drawn in packed batches: masks are keyed by row and position, and the mesh decides which rows "
    "Batching.Packed puts side by side; set batching=Batching.Padded() or batching=Batching.Bucketed(), which compute "
    "the same objective with this dropout, or adapter.dropout=0.0, which keeps packed batches and trains without "
    "dropout"
)


def adapter_problems(experiment: Experiment) -> Iterator[Problem]:
    """What does not go with an experiment's adapter."""
    adapter, weights = experiment.adapter, experiment.model.weights
    if isinstance(weights, PEFT):
        yield Problem(
            "model.weights",
            "Weights.PEFT is an adapter and no model; go on with it by Adapter.LoRA(start=...), "
            "or merge it by Weights.Merged",
        )
    if not isinstance(adapter, LowRank):
        return
    if adapter.dropout and isinstance(experiment.batching, Packed):
        yield Problem("adapter.dropout", DROPOUT_OF_PACKED.format(adapter.dropout))
    if adapter.dropout and experiment.mesh.stage > 1:
        yield Problem("adapter.dropout", "has no form in the stages of a pipeline; set 0.0, or mesh.stage=1")
    if isinstance(adapter.start, From):
        yield from _unlike(adapter, adapter.start.experiment, experiment)


def unlike(ours: LowRank, theirs: LowRank) -> Iterator[Problem]:
    """In what an adapter differs from the one that it goes on with."""
    if type(ours) is not type(theirs):
        message = f"expected {type(theirs).__qualname__}, which adapter.start holds, got {type(ours).__qualname__}"
        yield Problem("adapter", message)
    for name in SAME:
        own, other = getattr(ours, name), getattr(theirs, name)
        if own != other:
            yield Problem(f"adapter.{name}", f"expected {other!r}, which adapter.start was trained with, got {own!r}")


def _unlike(adapter: LowRank, earlier: Experiment, experiment: Experiment) -> Iterator[Problem]:
    if not isinstance(earlier.adapter, LowRank):
        yield Problem("adapter.start", f"{earlier.name} trains all weights and has no adapter; use model.weights")
        return
    yield from unlike(adapter, earlier.adapter)
    if earlier.model.weights != experiment.model.weights:
        message = f"its adapter belongs to {earlier.model.weights!r}, not to model.weights; both must be the same"
        yield Problem("adapter.start", message)
