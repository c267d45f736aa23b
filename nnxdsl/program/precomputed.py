"""Values that are computed once, before the first step, and come with each batch: of references and teachers."""

from __future__ import annotations

from typing import Any

from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK
from nnxdsl.program import init
from nnxdsl.program.batches import kind_of
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.forward import Leaves
from nnxdsl.program.step import Batch


def with_reference_logps(program: Program, state: TrainState, batch: Batch) -> Batch:
    """The batch with reference log-probabilities computed by the policy of `state`.

    Args:
        program: The program.
        state: The initial state, whose policy is the reference.
        batch: Pairs.

    Raises:
        ValueError: the batch has no pairs.
    """
    return kind_of(batch).with_reference_logps(batch, program.score(state, batch).loss_inputs)


def load_reference(program: Program, source: init.Source | None = None) -> Leaves:
    """The weights of a reference that is loaded from a checkpoint, on the devices.

    Args:
        program: The program.
        source: Source of its weights; None for random weights and Hub directories, which need no run directory.

    Raises:
        PlanError: tensors are missing or have another shape; all are named.
        WeightsError: files cannot be read.
    """
    source = init.open_source(program.blueprint) if source is None else source
    return init.init_reference(program.blueprint, source, program.mesh)


def reference_outputs(program: Program, reference: Leaves, batch: Batch) -> Any:
    """The loss inputs of a reference that is loaded from a checkpoint."""
    batch = program.shard_batch(kind_of(batch).without_cached(batch))
    return program.jitted.reference_outputs(reference, batch)


def load_teacher(program: Program, source: init.Source | None = None) -> Leaves:
    """The weights of a teacher on the devices; load a precomputed teacher before the training state.

    Args:
        program: The program.
        source: See `load_reference`.

    Raises:
        PlanError: as `load_reference`.
        WeightsError: as `load_reference`.
    """
    source = init.open_source(program.blueprint) if source is None else source
    return init.init_teacher(program.blueprint, source, program.mesh)


def teacher_top_k(program: Program, teacher: Leaves, batch: Batch) -> TeacherTopK:
    """A teacher's top-k tokens at each target of a batch, `[B, T - 1, k]`."""
    return program.jitted.teacher_top_k(teacher, program.shard_batch(kind_of(batch).without_cached(batch)))


def with_teacher_top_k(program: Program, teacher: Leaves, batch: Batch) -> Batch:
    """The batch with the teacher's top k, which a step with `objective.top_k` reads.

    Args:
        program: The program.
        teacher: Its weights.
        batch: Sequences, padded or packed.

    Raises:
        ValueError: the batch has no sequences.
    """
    return kind_of(batch).with_teacher_top_k(batch, teacher_top_k(program, teacher, batch))
