"""Run by test_references.py with eight CPU devices: what programs with other references and answers say on meshes."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from small_lab import samples
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Data,
    Experiment,
    Memory,
    Mesh,
    Objective,
    Optimizer,
    Reference,
    Schedule,
    Weights,
    compile,
)
from nnxdsl.data.batch import PairBatch
from nnxdsl.program import init

LORA = {"adapter": Adapter.LoRA(rank=2)}
SYNCED = Reference.Synced(every_steps=2, ref_model_mixup_alpha=0.4)
RUNS: dict[str, dict[str, Any]] = {
    "kto": {"objective": Objective.KTO(beta=0.5), **LORA},
    "synced": {"objective": Objective.DPO(beta=0.5), "reference": SYNCED},
    "other": {"objective": Objective.DPO(beta=0.5), "reference": Reference.Checkpoint(Weights.HF("other")), **LORA},
    "modified": {"objective": Objective.DPO(beta=0.5, ld_alpha=0.3, weighting="wpo"), **LORA},
}
MESHES = {"one": Mesh(), "eight": Mesh(data=2, fsdp=2, tensor=2)}


def rollout_batch(rows: int, desirable: bool) -> PairBatch:
    """Pairs, or answers, of unequal lengths."""
    draw = np.random.default_rng(3)
    lengths = {name: draw.integers(1, 9, rows).astype(np.int32) for name in ("prompt", "chosen", "rejected")}
    ids = {name: draw.integers(1, 48, (rows, 8)).astype(np.int32) for name in lengths}
    slots = np.arange(8)
    return PairBatch(
        prompt=np.where(slots >= 8 - lengths["prompt"][:, None], ids["prompt"], 0),
        **{name: np.where(slots < lengths[name][:, None], ids[name], 0) for name in ("chosen", "rejected")},
        **{f"{name}_length": length for name, length in lengths.items()},
        weight=np.ones(rows, np.float32),
        desirable=(np.arange(rows) % 3 > 0).astype(np.float32) if desirable else None,
    )


def steps(fields: dict[str, Any], mesh: Mesh) -> list[dict[str, float]]:
    """The metrics of three steps."""
    kind = Data.Feedback if fields["objective"].batch_kind == "feedback" else Data.Preferences
    program = compile(
        Experiment(
            name="references",
            model=Small(layers=1, pattern=1, heads=4),
            data=kind("none.jsonl", max_prompt_length=16, max_completion_length=16),
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), max_grad_norm=None),
            batch_size=8,
            steps=3,
            mesh=mesh,
            memory=Memory(reference="online"),
            **fields,
        )
    )
    state = program.init(init.ReferenceSource(samples.Trained(program, 0), samples.Trained(program, 1)))
    result = []
    for _ in range(3):
        state, metrics = program.step(state, rollout_batch(8, desirable=kind is Data.Feedback))
        result.append({name: float(value) for name, value in metrics.items()})
    return result


if __name__ == "__main__":
    print(json.dumps({name: steps(RUNS[sys.argv[1]], mesh) for name, mesh in MESHES.items()}))
