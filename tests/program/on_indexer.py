"""Run by test_indexer_loss.py with eight CPU devices: two steps with the loss of indexers on meshes, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from indexer_rows import batch_of, model_of

from nnxdsl import Batching, Data, Experiment, Memory, Mesh, Objective, Optimizer, Schedule, compile

NAME = "deepseek_v32"
WARMUP = {"indexer_stage": "dense_warmup"}
FROZEN = {"indexer_loss_coef": 0.0}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {}),
    "fsdp4-tensor2": ({}, {"mesh": Mesh(fsdp=4, tensor=2), "memory": Memory(remat="inputs")}),
    "data2-context2-expert2": ({}, {"mesh": Mesh(data=2, context=2, expert=2), "microbatch_size": 4}),
    "data4-tensor2-packed": (
        {},
        {
            "mesh": Mesh(data=4, tensor=2),
            "batching": Batching.Packed(),
            "memory": Memory(attention="chunked", remat="full"),
        },
    ),
    "warmup-one": (WARMUP, {}),
    "warmup-fsdp2-context2-tensor2": (WARMUP, {"mesh": Mesh(fsdp=2, context=2, tensor=2)}),
    "frozen-one": (FROZEN, {}),
    "frozen-stage3": (FROZEN, {"mesh": Mesh(stage=3)}),
}


def main() -> None:
    """Prints the metrics of the second step of each run, and how far its weights are from those of the first run."""
    report: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for name, (stage, fields) in RUNS.items():
        experiment = Experiment(
            name="indexers",
            model=model_of(NAME, **{"indexer_loss_coef": 0.5, **stage}),
            objective=Objective.SFT(loss_on="all"),
            data=Data.Text("none.jsonl", max_length=20),
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.02), max_grad_norm=None),
            batch_size=8,
            steps=10,
            **fields,
        )
        program = compile(experiment)
        state, batch = program.init(), batch_of(program, NAME)
        state, _ = program.step(state, batch)
        state, metrics = program.step(state, batch)
        leaves = jax.device_get(state.trainable)
        first = leaves if name.endswith("one") else first
        report[name] = {
            "metrics": {key: float(value) for key, value in metrics.items()},
            "away": max(float(jnp.abs(leaf - first[path]).max()) for path, leaf in leaves.items()),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
