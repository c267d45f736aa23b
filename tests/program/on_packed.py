"""Run by test_packing.py in a process with eight CPU devices: one step of packed pairs on meshes, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small_lab import samples
from small_lab.model import Small

from nnxdsl import Adapter, Batching, Data, Experiment, Mesh, Objective, Optimizer, Schedule, compile
from nnxdsl.program import precomputed
from tests.program import test_packing as packing

MESHES = {
    "padded on one device": (Mesh(), Batching.Padded()),
    "packed, rows and width cut": (Mesh(fsdp=4, tensor=2), Batching.Packed()),
    "packed, stages and tokens cut": (Mesh(data=2, stage=2, context=2), Batching.Packed()),
}


def main() -> None:
    """One entry for each mesh."""
    dataset = packing.pairs_of(np.random.default_rng(3).integers(1, [17, 17, 17], (40, 3)).tolist())
    report: dict[str, Any] = {}
    for name, (mesh, batching) in MESHES.items():
        experiment = Experiment(
            name="packed",
            model=Small(layers=2, pattern=1, heads=4),
            objective=Objective.DPO(beta=0.5),
            data=Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
            adapter=Adapter.LoRA(rank=2),
            batch_size=16,
            microbatch_size=8,
            steps=10,
            mesh=mesh,
            batching=batching,
        )
        program = compile(experiment)
        state = samples.trained(program)
        batch = precomputed.with_reference_logps(
            program, state, packing.batches(dataset, program, batching).batch_at(0)
        )
        state, _ = program.step(state, batch)
        state, metrics = program.step(state, batch)
        report[name] = {
            "shape": [*batch[0].shape],
            "metrics": {key: float(value) for key, value in metrics.items()},
            "norm": float(sum(jnp.sum(leaf**2) for leaf in jax.device_get(state.trainable).values())),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
