"""Run by test_policies.py in a process with eight CPU devices: a student's and a policy's steps on meshes, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
from small_lab import samples
from small_lab.model import Small

from nnxdsl import Data, Experiment, Memory, Mesh, Objective, Optimizer, Reward, Schedule, compile
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.program import precomputed

MESHES = {"one": Mesh(), "fsdp2-tensor2-context2": Mesh(fsdp=2, tensor=2, context=2)}
TEACHER = Small(layers=1, pattern=1, embed_dim=32, heads=4)
KINDS: dict[str, dict[str, Any]] = {
    "distill": {
        "objective": Objective.Distill(teacher=TEACHER, loss_on="all", hard_weight=0.2),
        "data": Data.Text("none.jsonl", max_length=32),
        "memory": Memory(logprob_tokens=16, attention="dense"),
    },
    "taught once": {  # more words than a piece of the vocabulary has
        "objective": Objective.Distill(teacher=TEACHER, loss_on="all", hard_weight=0.2, top_k=30),
        "data": Data.Text("none.jsonl", max_length=32),
        "memory": Memory(logprob_tokens=16, attention="dense"),
    },
    "grpo": {
        "objective": Objective.DAPO(
            rewards=(Reward("none"),), num_generations=4, num_iterations=2, epsilon_high=None, beta=0.04
        ),
        "data": Data.Prompts("none.jsonl", max_prompt_length=8, max_completion_length=8),
        "memory": Memory(attention="dense"),
    },
}


def main() -> None:
    """One entry for each kind, of those that are named if any are, and mesh."""
    report: dict[str, dict[str, Any]] = {}
    for name, fields in KINDS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        batch = samples.answers() if name == "grpo" else samples.sequences(8)
        for where, mesh in MESHES.items():
            experiment = Experiment(
                name="small",
                model=Small(layers=1, pattern=1, embed_dim=16, heads=4),
                optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), max_grad_norm=None),
                batch_size=8,
                microbatch_size=None if where == "one" else 4,
                steps=2,
                mesh=mesh,
                **fields,
            )
            program = compile(experiment, jax.devices()[: mesh.device_count])
            state = program.init()
            said: list[list[int]] = []
            if name == "grpo":
                template, leaves = program.policy(state)
                blueprint = program.blueprint
                sampler = Sampler(template, blueprint.config, blueprint.compute, (0,), program.batch_sharding)
                prompts = [[3, 5, 7 + row] for row in range(8)]
                result = sampler.complete(leaves, prompts, Sampling(6, temperature=1.0), prompt_length=8)
                said = [one.ids for one in result]
            if name == "taught once":
                batch = precomputed.with_teacher_top_k(program, precomputed.load_teacher(program), batch)
            result = []
            for _ in range(2):
                state, metrics = program.step(state, batch)
                result.append({key: float(value) for key, value in metrics.items()})
            report[f"{name} {where}"] = {"steps": result, "said": said}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
