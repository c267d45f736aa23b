"""Run by test_policies.py in a process with eight CPU devices: a student's and a policy's steps on meshes, as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("small_fixtures", HERE / "conftest.py")
assert spec is not None
assert spec.loader is not None
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)

from small_lab.model import Small  # noqa: E402

from nnxdsl import Data, Experiment, Memory, Mesh, Objective, Optimizer, Reward, Schedule, compile  # noqa: E402
from nnxdsl.data.batch import RolloutBatch  # noqa: E402
from nnxdsl.run.generate import Sampler  # noqa: E402
from nnxdsl.run.sampling import Sampling  # noqa: E402

MESHES = {"one": Mesh(), "fsdp2-tensor2-context2": Mesh(fsdp=2, tensor=2, context=2)}
TEACHER = Small(layers=1, pattern=1, embed_dim=32, heads=4)
KINDS: dict[str, dict[str, Any]] = {
    "distill": {
        "objective": Objective.Distill(teacher=TEACHER, loss_on="all", hard_weight=0.2),
        "data": Data.Text("none.jsonl", max_length=32),
        "memory": Memory(logprob_tokens=16, attention="dense"),
    },
    "grpo": {
        "objective": Objective.GRPO(rewards=(Reward("none"),), group_size=4, updates_per_rollout=2, average="tokens"),
        "data": Data.Prompts("none.jsonl", max_prompt_length=8, max_response_length=8),
        "memory": Memory(attention="dense"),
    },
}


def answers() -> RolloutBatch:
    """Eight prompts with answers of unequal lengths."""
    draw = np.random.default_rng(2)
    prompt, said = draw.integers(1, 9, 8), draw.integers(1, 9, 8)
    tokens, answer = np.zeros((8, 16), np.int32), np.zeros((8, 8), np.int32)
    for row in range(8):
        ids = draw.integers(1, fixtures.VOCAB, prompt[row] + said[row])
        tokens[row, : len(ids)], answer[row, : said[row]] = ids, ids[prompt[row] :]
    mask = np.arange(8) < said[:, None]
    old = (draw.normal(-3, 0.5, (8, 8)) * mask).astype(np.float32)
    one = np.ones(8, np.float32)
    gain = draw.normal(size=8).astype(np.float32)
    return RolloutBatch(tokens, (prompt + said).astype(np.int32), answer, mask, one, gain, 8 * one, old)


def main() -> None:
    """One entry for each kind and mesh."""
    report: dict[str, dict[str, Any]] = {}
    for name, fields in KINDS.items():
        batch = answers() if name == "grpo" else fixtures.sequences._get_wrapped_function()()(8)
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
                sharding = program.batch_sharding(8)
                place = lambda rows, sharding=sharding: jax.device_put(rows, sharding)  # noqa: E731
                sampler = Sampler(template, blueprint.config, blueprint.compute, (0,), place)
                prompts = [[3, 5, 7 + row] for row in range(8)]
                said = sampler.drawn(leaves, prompts, Sampling(6, temperature=1.0), 8)
            found = []
            for _ in range(2):
                state, metrics = program.step(state, batch)
                found.append({key: float(value) for key, value in metrics.items()})
            report[f"{name} {where}"] = {"steps": found, "said": said}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
