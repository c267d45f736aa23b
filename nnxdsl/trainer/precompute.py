"""The phase before training: log-probs of a fixed reference, or a teacher's top-k, are computed once per row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nnxdsl.config.adapter import DoRA
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.sampler import BatchSampler, Rows
from nnxdsl.data.sequences import Sequences
from nnxdsl.program import precomputed
from nnxdsl.program.compile import TrainState
from nnxdsl.program.init import Source
from nnxdsl.program.step import Leaves
from nnxdsl.runs.array_digest import digest
from nnxdsl.trainer.precompute_cache import PrecomputeCache
from nnxdsl.trainer.precompute_specs import reference_logps, teacher_top_k
from nnxdsl.trainer.prepare import Prepared
from nnxdsl.trainer.provenance import Provenance
from nnxdsl.weights.progress import reading_weights


def precompute_teacher(prepared: Prepared, source: Source, provenance: Provenance, cache: PrecomputeCache) -> None:
    """Adds a teacher's top-k tokens to the datasets, if the objective precomputes them.

    The teacher's weights are on the devices while this runs, and before there is any training state.

    Args:
        prepared: Its datasets are replaced.
        source: The teacher's weights.
        provenance: Records their digest.
        cache: Of all runs.
    """
    program = prepared.program
    if program.blueprint.teacher is None or not program.blueprint.teacher.is_precomputed:
        return
    with reading_weights(
        cache.display, "reading the teacher's weights", source, program.blueprint.teacher.base
    ) as counted:
        teacher = precomputed.load_teacher(program, counted)
    weights = digest(teacher)
    provenance.record(teacher=weights)

    def with_teacher(dataset: Dataset, rows: Rows) -> Dataset:
        assert isinstance(dataset, Sequences)  # `prepare` refuses others
        arrays = cache.load_or_compute(teacher_top_k(program, teacher, weights, dataset), dataset, rows)
        return dataset if arrays is None else dataset.with_teacher_top_k(arrays["ids"], arrays["logp"])

    _attach_cached(prepared, with_teacher)


def precompute_reference(
    prepared: Prepared, state: TrainState, own_weights: Leaves | None, provenance: Provenance, cache: PrecomputeCache
) -> None:
    """Adds log-probabilities of the reference to the datasets, and its completions to the evaluator, if it is cached.

    Args:
        prepared: Its datasets are replaced.
        state: The state before any step.
        own_weights: The weights of a reference that has its own.
        provenance: Has the digest of the frozen weights.
        cache: Of all runs.
    """
    program, evaluator = prepared.program, prepared.evaluator
    experiment = program.experiment
    if experiment.reference_mode != "cached":
        return
    if own_weights is not None:
        weights = digest(own_weights)
    else:  # a new DoRA is its base, but for rounding: the values of the one are not those of the other
        weights = provenance.digests["frozen"] + (" DoRA" if isinstance(experiment.adapter, DoRA) else "")

    def with_reference(dataset: Dataset, rows: Rows) -> Dataset:
        assert isinstance(dataset, Pairs)  # `prepare` refuses others
        spec = reference_logps(program, weights, dataset, state, own_weights)
        arrays = cache.load_or_compute(spec, dataset, rows)
        return dataset if arrays is None else dataset.with_reference_logps(arrays["logps"])

    _attach_cached(prepared, with_reference)
    if evaluator is not None and not cache.should_stop():
        evaluator.prepare(state, own_weights)


def _attach_cached(prepared: Prepared, attach: Callable[[Dataset, Rows], Dataset]) -> None:
    """Replaces the training rows and the held-out rows by rows with precomputed values."""
    sampler, evaluator = prepared.sampler, prepared.evaluator
    assert isinstance(sampler, BatchSampler)  # rollouts have no rows to compute anything for
    rows = training_rows(sampler, prepared.program.blueprint.total_steps)
    prepared.sampler = sampler.over(attach(sampler.dataset, rows))
    if evaluator is not None and evaluator.dataset is not None:
        evaluator.dataset = attach(evaluator.dataset, np.arange(len(evaluator.dataset)))


def training_rows(sampler: BatchSampler, steps: int) -> Rows:
    """The rows that so many steps train on, each once, ascending."""
    if steps * sampler.batch_size >= len(sampler.dataset):
        return np.arange(len(sampler.dataset))
    return np.unique(np.concatenate([sampler.indices(step) for step in range(steps)]))
