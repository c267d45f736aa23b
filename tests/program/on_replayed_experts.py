"""Run by test_replayed_experts.py in a process with eight CPU devices: log-probabilities with experts, as JSON."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

from nnxdsl import Data, Experiment, Mesh, Model, Objective, Optimizer, Reward, Schedule, compile
from nnxdsl.data.batch import PER_COMPLETION, GroupBatch, RolloutBatch

MESHES = {"fsdp": Mesh(fsdp=2), "context": Mesh(context=2)}


def batches() -> tuple[RolloutBatch, GroupBatch]:
    """Two groups of two completions, each of 8 tokens after 8 of the prompt, whose experts are drawn."""
    draw = np.random.default_rng(0)
    prompt, ids = np.repeat(draw.integers(1, 200, (2, 8)), 2, axis=0), draw.integers(1, 200, (4, 8))
    full, ones = np.full(4, 8, np.int32), np.ones((4, 8), np.float32)
    experts = np.argsort(draw.random((4, 16, 4, 4)), axis=-1)[..., :2].astype(np.int16)
    experts[1::2, :8] = experts[::2, :8]
    tokens = np.concatenate([prompt, ids], axis=1).astype(np.int32)
    arrays = ids.astype(np.int32), full, ones > 0, ones[:, 0], ones, full.astype(np.float32)
    rows = RolloutBatch(tokens, 2 * full, *arrays, routed_experts=experts)
    by_group = {name: getattr(rows, name) for name in PER_COMPLETION if getattr(rows, name) is not None}
    by_group = {name: array.reshape(2, 2, *array.shape[1:]) for name, array in by_group.items()}
    joined = np.concatenate([experts[::2, :8], experts[:, 8:].reshape(2, 16, 4, 2)], axis=1)
    return rows, GroupBatch(prompt[::2].astype(np.int32), full[::2], **by_group, routed_experts=joined)


def main() -> None:
    """Log-probabilities of the tokens of completions, by where they are computed."""
    experiment = {
        "name": "replay",
        "model": Model.Mixtral("tiny"),
        "objective": Objective.GRPO(rewards=(Reward("none"),), num_generations=2, router_replay=True),
        "data": Data.Prompts("none.jsonl", max_prompt_length=8, max_completion_length=8),
        "optimizer": Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        "batch_size": 4,
        "steps": 1,
    }
    rows, groups = batches()
    one = compile(Experiment(**experiment), jax.devices()[:1])
    cases = {"one": (one, rows), "anew": (one, rows._replace(routed_experts=None)), "groups": (one, groups)}
    cases |= {name: (compile(Experiment(**experiment, mesh=m), jax.devices()[:2]), rows) for name, m in MESHES.items()}
    scores = {name: program.score(program.init(), batch).token_stats.logp for name, (program, batch) in cases.items()}
    json.dump({name: np.asarray(logps).reshape(4, 8).tolist() for name, logps in scores.items()}, sys.stdout)


if __name__ == "__main__":
    main()
