"""Specs for the precompute cache: log-probabilities of a fixed reference, top-k tokens of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.data.batch import Batch, SequenceBatch
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.sequences import Sequences
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK
from nnxdsl.program import precomputed
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.step import Leaves
from nnxdsl.runs.code_digest import code_digest, code_versions
from nnxdsl.trainer.precompute_cache import PrecomputeSpec

REFERENCE, TEACHER = ".reference", ".teacher"
"""Directories under the home of all runs."""


def reference_logps(
    program: Program, weights: str, dataset: Pairs, state: TrainState, own_weights: Leaves | None = None
) -> PrecomputeSpec:
    """Log-probabilities that the reference gives to pairs, `logps` [rows, 2] float32 of chosen and rejected.

    Args:
        program: The program.
        weights: Digest of the reference's weights.
        dataset: The pairs.
        state: The state before any step, whose policy is the reference.
        own_weights: The weights of a reference that has its own, which is then used instead.
    """
    blueprint, quantization = program.blueprint, program.experiment.quantization

    def compute(batch: Batch) -> Any:
        if own_weights is not None:
            return precomputed.reference_outputs(program, own_weights, batch)
        return program.score(state, batch).loss_inputs

    def entries(batch: Batch, count: int, scored: Any) -> Mapping[str, npt.NDArray[Any]]:
        return {"logps": np.stack([scored.chosen_logps, scored.rejected_logps], axis=-1)[:count]}

    return PrecomputeSpec(
        directory=REFERENCE,
        values="reference log-probs",
        unit="pairs",
        key={
            "weights": weights,
            "network": attrs.asdict(blueprint.config),
            "quantization": None if quantization is None else to_dict(quantization),
            "ids": dataset.ids_digest(),
            "ld_alpha": program.experiment.objective.ld_alpha,
            "compute": blueprint.compute.name,
            "frozen": blueprint.frozen_dtype.name,
            "attention": attrs.asdict(blueprint.kernels),
            **_numerics(program),
        },
        ends=np.arange(len(dataset) + 1),
        arrays={"logps": ((2,), np.float32)},
        batch_size=blueprint.forward_batch_size,
        compute=compute,
        entries=entries,
        reads=program.reads,
    )


def teacher_top_k(program: Program, teacher: Leaves, weights: str, dataset: Sequences) -> PrecomputeSpec:
    """The top-k tokens of a teacher for each target.

    `ids` [targets, k] int32 are the ids, `logp` [targets, k + 1] float32 their log-probabilities with that of all
    other tokens behind them.

    Args:
        program: The program.
        teacher: The teacher's weights.
        weights: Their digest.
        dataset: The sequences.
    """
    blueprint, objective = program.blueprint, program.experiment.objective
    assert isinstance(objective, Distill)
    assert objective.top_k is not None
    assert blueprint.teacher is not None

    def entries(batch: SequenceBatch, count: int, top: TeacherTopK) -> Mapping[str, npt.NDArray[Any]]:
        mask = batch.loss_mask[:count, 1:]  # by the position that predicts a target, [rows, T - 1]
        ids, logp = top
        return {"ids": np.asarray(ids)[:count][mask], "logp": np.asarray(logp)[:count][mask]}

    return PrecomputeSpec(
        directory=TEACHER,
        values=f"teacher top-{objective.top_k} log-probs",
        unit="rows",
        key={
            "weights": weights,
            "network": attrs.asdict(blueprint.teacher.config),
            "ids": dataset.ids_digest(),
            "top_k": objective.top_k,
            "temperature": objective.temperature,
            "compute": blueprint.compute.name,
            "frozen": blueprint.frozen_dtype.name,
            "attention": attrs.asdict(blueprint.teacher_kernels),
            **_numerics(program),
        },
        ends=dataset.target_ends,
        arrays={"ids": ((objective.top_k,), np.int32), "logp": ((objective.top_k + 1,), np.float32)},
        batch_size=blueprint.forward_batch_size,
        compute=lambda batch: precomputed.teacher_top_k(program, teacher, batch),
        entries=entries,
    )


def _numerics(program: Program) -> dict[str, Any]:
    """Device, code and versions, in plain values: with others the same computation may round otherwise."""
    device = program.mesh.devices.flat[0]
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "code": code_digest(),
        "versions": code_versions(),
    }
