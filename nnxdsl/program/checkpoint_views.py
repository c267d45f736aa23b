"""The arrays of a checkpoint, by group and path: abstract ones, those of a state, and a state with restored ones."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.init import sort_like
from nnxdsl.sharding.layout import abstract_arrays
from nnxdsl.sharding.mesh import on_devices


def checkpoint_targets(program: Program) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The abstract arrays of a checkpoint, with their shardings, by group ("trainable", "optimizer", ...) and path."""
    parts = ("trainable", "optimizer", *(("reference",) if program.blueprint.reference.is_synced else ()))
    return {part: abstract_arrays(program.layout, program.mesh, part) for part in parts}


def checkpoint_arrays(program: Program, state: TrainState) -> dict[str, dict[str, jax.Array]]:
    """The arrays of a checkpoint of `state`, by group and path, as in `checkpoint_targets`."""
    leaves = jax.tree.leaves(state.optimizer)
    return {
        "trainable": dict(state.trainable),
        "optimizer": dict(zip(program.layout.arrays.get("optimizer", {}), leaves, strict=True)),
        **({"reference": dict(state.reference)} if program.blueprint.reference.is_synced else {}),
    }


def with_restored(
    program: Program, state: TrainState, step: int, groups: Mapping[str, Mapping[str, jax.Array]]
) -> TrainState:
    """`state` with the arrays of a checkpoint of `step`, by group and path."""
    leaves = [groups["optimizer"][path] for path in program.layout.arrays.get("optimizer", {})]
    is_synced = program.blueprint.reference.is_synced
    return TrainState(
        on_devices(np.int32(step), program.replicated),
        sort_like(groups["trainable"], program.blueprint.trainable),
        jax.tree.unflatten(jax.tree.structure(state.optimizer), leaves),
        state.frozen,
        sort_like(groups["reference"], state.reference) if is_synced else state.reference,
    )
