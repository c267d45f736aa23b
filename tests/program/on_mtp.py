"""Run by test_mtp_loss.py with eight CPU devices: steps of tokens predicted further ahead on meshes, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl import Batching, Data, Experiment, Memory, Mesh, Model, Objective, Optimizer, Schedule, Weights, compile
from tests.program import test_packing as packing

FIGURES = Path(__file__).parents[1] / "reference" / "mtp" / "deepseek_v3"


MODEL = Model.HF(str(FIGURES), weights=Weights.HF(str(FIGURES)), mtp_layers=1)
RUNS: dict[str, dict[str, Any]] = {
    "one": {},
    "packed": {"batching": Batching.Packed(), "memory": Memory(attention="chunked", remat="full", logprob_tokens=32)},
    "fsdp4-tensor2": {"mesh": Mesh(fsdp=4, tensor=2)},
    "data2-context2-tensor2": {"mesh": Mesh(data=2, context=2, tensor=2), "batching": Batching.Packed()},
    "data2-expert2-stage2": {"mesh": Mesh(data=2, expert=2, stage=2), "memory": Memory(remat="inputs")},
}


def main() -> None:
    """Prints the metrics of two steps of each run, and how far its weights are from those of the first."""
    lengths = np.random.default_rng(3).integers(2, 33, 40).tolist()
    dataset = packing.sequences_of(lengths)
    report: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for name, asked in RUNS.items():
        experiment = Experiment(
            **{
                "name": "further",
                "model": MODEL,
                "objective": Objective.SFT(loss_on="all", mtp_loss_weight=0.3),
                "data": Data.Text("none.jsonl", max_length=32),
                "optimizer": Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), max_grad_norm=None),
                "batch_size": 16,
                "microbatch_size": 8,
                "steps": 10,
                **asked,
            }
        )
        program = compile(experiment)
        state = program.init()
        batches = packing.batches(dataset, program, experiment.batching)
        state, _ = program.step(state, batches.batch_at(0))
        state, metrics = program.step(state, batches.batch_at(1))
        leaves = jax.device_get(state.trainable)
        first = first or leaves
        report[name] = {
            "metrics": {key: float(value) for key, value in metrics.items()},
            "away": max(float(jnp.abs(leaf - first[path]).max()) for path, leaf in leaves.items()),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
